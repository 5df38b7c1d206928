"""Whether an accelerator packs with Triton's kernels (shards/compress_triton.py) or with torch's operations, which need more
passes over memory and come to the same bits.

[Note: kernels on trial]
Triton may be missing, too old or too new, or unable to compile here. And which operations it makes one of is up to its version,
while ranks, replays and checkpoints count on the same bits. So the kernels are tried first, once per process, against torch's
operations. If anything fails then or later, one warning says so, and torch's operations are used from there on.
"""

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from unwall.shards.compress_torch import BLOCK, pack_blocks, unpack_blocks


class DeviceKernels:
    """Those of one process. See [Note: kernels on trial]."""

    def __init__(self, name: str = "unwall.shards.compress_triton") -> None:
        self._name = name
        self._module: ModuleType | None = None
        self._tried = False

    def usable(self, device: torch.device) -> bool:
        """Whether the kernels work here. The first call finds out."""
        if not self._tried:
            self._tried = True
            self._attempt(lambda: self._try(device))
        return self._module is not None

    def pack(self, device: torch.device, *arguments: Any) -> bool:
        """Whether ``compress_triton.pack`` has done it. So below."""
        return self.usable(device) and self._attempt(lambda: self._call("pack", *arguments))

    def unpack(self, device: torch.device, *arguments: Any) -> bool:
        return self.usable(device) and self._attempt(lambda: self._call("unpack", *arguments))

    def _call(self, verb: str, *arguments: Any) -> None:
        getattr(self._module, verb)(*arguments)

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
            return True
        except ImportError as error:
            self._module, said = None, f"Triton is not there ({error})"
        except Exception as error:
            self._module, said = None, f"Triton's kernels fail here ({type(error).__name__}: {error})"
        warnings.warn(f"{said}: what travels compressed is packed by torch's operations, which take longer", stacklevel=2)
        return False

    def _try(self, device: torch.device) -> None:
        module = importlib.import_module(self._name)
        for bits, dtype in ((8, torch.bfloat16), (4, torch.bfloat16), (8, torch.float16), (4, torch.float16)):
            if not agrees(module, bits, dtype, device):
                raise ValueError(f"other bits than torch's operations, with {bits} bits of {dtype}")
        self._module = module


KERNELS = DeviceKernels()


def agrees(module: ModuleType, bits: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels of ``module`` come to the bits of torch's operations, with what is not finite and what is tiny."""
    pieces, blocks, seed = 3, 3, 0xDEADBEEF
    count, width = blocks * BLOCK, BLOCK * bits // 8
    place = torch.arange(pieces * count, dtype=torch.float32, device=device)
    values = ((place * 0.7).sin() * (place * 0.013).cos() * 40).to(dtype)
    values[0], values[5], values[count] = float("inf"), float("nan"), float("-inf")
    values[BLOCK : 2 * BLOCK] = 0
    rest = (place * 0.3).sin().to(dtype)
    nbytes = blocks * (4 + width)
    for chance, feeds in ((None, False), (seed, False), (seed, True)):
        packed, expected = (torch.empty(pieces * nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        found, kept = (rest.clone() if feeds else None for _ in range(2))
        module.pack(packed, values, pieces, bits, chance, found)
        parts = []
        for piece in range(pieces):
            scales, codes = expected[piece * nbytes :][:nbytes].split([blocks * 4, blocks * width])
            span = slice(piece * count, (piece + 1) * count)
            rest_of = None if kept is None else kept[span]
            pack_blocks(scales.view(torch.float32), codes, values[span], bits, span.start, chance, rest_of)
            parts.append(unpack_blocks(scales.view(torch.float32), codes, bits))
        if not torch.equal(packed, expected) or (found is not None and kept is not None and not torch.equal(found, kept)):
            return False
    back, total = torch.empty_like(values), torch.empty(count, dtype=dtype, device=device)
    module.unpack(back, expected, pieces, 1, bits, 1)
    module.unpack(total, expected, 1, pieces, bits, 3)
    average = (parts[0] + parts[1] + parts[2]) / torch.full((), 3.0, device=device)
    return all(_same(*pair) for pair in ((back, torch.cat(parts).to(dtype)), (total, average.to(dtype))))


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """NaN is NaN, whatever its bits."""
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
