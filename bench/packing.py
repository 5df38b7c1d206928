"""What packing and unpacking cost on one core, beside the update: ``python -m bench.packing``.

Seconds of the processor, not of the clock, and the least of many rounds that take turns, so that a busy machine says the same.
The last line has the numbers of HOST_PACKING in planner/pace.py: what an element costs, as memory traffic of an update that
takes as long. With ``--device`` it is the accelerator's seconds, by Triton's kernels and by torch's operations, as bytes of its
memory traffic: DEVICE_PACKING.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from unwall.native import quantise as native
from unwall.native.pool import AdamWStep, DType, WorkerPool, shared_pool
from unwall.planner.formulas import SPLIT_UPDATE_TRAFFIC_BYTES
from unwall.planner.measure import best_s, device_memory_rate
from unwall.shards import compress
from unwall.shards.compress import packed_bytes
from unwall.shards.compress_device import DeviceKernels

NUMEL = 1 << 23
"""Of each piece: far more than caches hold."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", action="store_true", help="of the accelerator")
    options = parser.parse_args()
    rounds = options.rounds
    if options.device:
        _on_device()
        return
    with WorkerPool(1) as pool:
        works = _works(pool)
        best = dict.fromkeys(works, float("inf"))
        for _ in range(rounds):
            for name, work in works.items():
                best[name] = min(best[name], _spent_s(work))
    update = SPLIT_UPDATE_TRAFFIC_BYTES * NUMEL / best.pop("update")
    said: dict[str, Any] = {name: round(NUMEL / seconds / 1e9, 2) for name, seconds in best.items()}
    print(json.dumps({"elements_per_s_in_billions": said, "update_GB_per_s": round(update / 1e9, 1)}))
    print(json.dumps({name: round(seconds / NUMEL * update, 1) for name, seconds in best.items()}))


def _on_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rate = device_memory_rate(device)
    values = torch.randn(8 * NUMEL, device=device).to(torch.bfloat16)
    usual = compress.KERNELS
    for name, kernels in (("Triton", usual), ("torch", DeviceKernels("no_module_of_that_name"))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps({"by": name, "usable": kernels.usable(device)}))
        compress.KERNELS = kernels
        for bits in (8, 4):
            codec = compress.Codec(bits, shared_pool)
            packed = torch.zeros(codec.packed_bytes(values.numel()), dtype=torch.uint8, device=device)
            works: dict[str, Callable[[], None]] = {
                "pack": lambda codec=codec, packed=packed: codec.pack(packed, values),  # type: ignore[misc]
                "pack with noise": lambda codec=codec, packed=packed: codec.pack(packed, values, 1, 7),  # type: ignore[misc]
                "unpack": lambda codec=codec, packed=packed: codec.unpack(values, packed),  # type: ignore[misc]
            }
            said = {each: round(best_s(work, device) * rate / values.numel(), 1) for each, work in works.items()}
            print(json.dumps({"by": name, "bits": bits, "bytes_per_element": said}))
    compress.KERNELS = usual


def _spent_s(work: Callable[[], None]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _works(pool: WorkerPool) -> dict[str, Callable[[], None]]:
    held = {name: torch.zeros(NUMEL, dtype=kind) for name, kind in STATES.items()}
    at = {name: value.data_ptr() for name, value in held.items()}
    grad = torch.randn(NUMEL).to(torch.bfloat16)
    step = AdamWStep(lr=1e-3, step=1)

    def update() -> None:
        pool.adamw(
            at["param"], at["exp_avg"], at["exp_avg_sq"], grad.data_ptr(), NUMEL, step, grad_dtype=DType.BF16,
            remainder=at["remainder"], keep=(held, grad),
        ).wait()  # fmt: skip

    found: dict[str, Callable[[], None]] = {"update": update}
    for bits in (8, 4):
        found |= _kernels(pool, grad, bits)
    return found


STATES = {"param": torch.bfloat16, "remainder": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def _kernels(pool: WorkerPool, values: torch.Tensor, bits: int) -> dict[str, Callable[[], None]]:
    packed, out = torch.zeros(2 * packed_bytes(NUMEL // 2, bits), dtype=torch.uint8), torch.empty_like(values)
    kind, keep = DType.BF16, (packed, values, out)

    def pack(seed: int | None) -> None:
        native.quantise(pool, packed.data_ptr(), values.data_ptr(), kind, NUMEL // 2, 2, bits, seed=seed, keep=keep).wait()

    def unpack() -> None:
        native.dequantise(pool, out.data_ptr(), packed.data_ptr(), kind, NUMEL // 2, 2, bits, keep=keep).wait()

    def add() -> None:
        native.dequantise(pool, out.data_ptr(), packed.data_ptr(), kind, NUMEL // 2, 2, bits, divisor=2.0, keep=keep).wait()

    return {
        f"pack {bits} bits": lambda: pack(None),
        f"pack {bits} bits, with noise": lambda: pack(7),
        f"unpack {bits} bits": unpack,
        f"sum of two, {bits} bits": add,
    }


if __name__ == "__main__":
    main()
