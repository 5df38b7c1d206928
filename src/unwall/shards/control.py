"""The exchange of a few words between the ranks of a model, apart from the data: how they agree, and on what."""

import atexit
import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(minutes=10)

TEXT_WORDS = 64
"""For a text that ranks tell each other, 7 bytes in each."""


class DivergedError(RuntimeError):
    """The ranks are not at the same point of the training loop, or one of them does not come to it."""


class Control:
    """The control group of one model. Every exchange blocks until all ranks have come to it."""

    def __init__(self, group: "dist.ProcessGroup | None", rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.exchanges = 0
        """Since the statistics were reset."""
        self.model = 0
        """The model's number, counted alike on every rank of the group."""
        self.bit_words = 0
        """Words that say which parameters of a group have a gradient; the largest group decides."""

    def begin(self, bit_words: int) -> None:
        """The model is ready. All ranks call it together."""
        self.bit_words = bit_words
        if self.group is not None:
            self.model = _counts[self.group] = self.models_begun + 1
            _live.add(self)

    def let_go(self) -> None:
        """Keeps the process group no longer."""
        self.group = None

    @property
    def models_begun(self) -> int:
        """How many models the ranks of this group have shared by now."""
        return 0 if self.group is None else _counts.get(self.group, 0)

    @property
    def only_model(self) -> bool:
        """Whether no other model of this process uses the same ranks."""
        return all(other is self or other.group is not self.group for other in _live)

    def exchange(self, words: Sequence[int], where: str) -> list[list[int]]:
        """Every rank's words, by rank: as many on each. DivergedError, naming ``where``, when another rank does not answer."""
        self.exchanges += 1
        every = torch.empty(self.size * len(words), dtype=torch.int64)
        try:
            all_gather_flat(every, torch.tensor(words, dtype=torch.int64), group=self.group)
        except RuntimeError as error:
            raise DivergedError(
                f"rank {self.rank} is at {where} and another rank did not answer (within {TIMEOUT}): did it fail, and do all "
                "ranks run the same number of iterations, of training and of evaluation?"
            ) from error
        return every.view(self.size, -1).tolist()

    def tell(self, text: str) -> list[str]:
        """Every rank's text, by rank, cut to what fits."""
        given = text.encode()[: 7 * TEXT_WORDS].ljust(7 * TEXT_WORDS)
        words = [int.from_bytes(given[at : at + 7], "little") for at in range(0, len(given), 7)]
        every = self.exchange(words, "an error")
        return [b"".join(word.to_bytes(7, "little") for word in row).decode(errors="ignore").strip() for row in every]


def all_gather_flat(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """torch's all-gather of flat tensors, whatever its name."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return call(whole, part, **options)


def pack_bits(indices: Sequence[int], count: int) -> tuple[int, ...]:
    """Indices below ``count`` as bits of 62-bit words."""
    words = [0] * (-(-count // 62))
    for index in indices:
        words[index // 62] |= 1 << (index % 62)
    return tuple(words)


def unpack_bits(words: Sequence[int]) -> set[int]:
    return {62 * at + bit for at, word in enumerate(words) for bit in range(62) if word >> bit & 1}


_live: "weakref.WeakSet[Control]" = weakref.WeakSet()
_counts: dict["dist.ProcessGroup", int] = {}
atexit.register(_counts.clear)  # see _let_go_of_groups in shards/collectives.py
