"""In which order samples are read.

[Note: order of samples]
All epochs together are one endless row of positions. ``Order.sample`` says which sample stands at a position, from nothing but
the seed: so a run resumes at the exact sample, nobody keeps a shuffled list, and any number of ranks sees the same order.

Where every file can be read at any place (.txt, .jsonl, ``datasets``), an epoch is a permutation of all samples: a small
Feistel network, walked until it hits a number in range. A parquet file is read by row groups: then row groups are shuffled,
taken together in windows of bounded size, and samples are shuffled inside each window, so only a window must be in memory.
"""

import bisect
import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

_ROUNDS = 4
_MASK = (1 << 64) - 1


class Permutation:
    """The numbers below ``size`` in a random order, without a list of them."""

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        self._keys = [_mix(key * _ROUNDS + number) for number in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        while True:  # the network permutes a power of 4, at most 4 times as many numbers: few steps lead back into range
            left, right = index >> self._half, index & self._low
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & self._low)
            index = left << self._half | right
            if index < self.size:
                return index


def _mix(value: int) -> int:
    """Splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Order:
    """See [Note: order of samples]. ``chunks``: rows of each piece that is read at once; ``nbytes``: what it takes in memory
    (0 where rows are read alone)."""

    def __init__(
        self, chunks: Sequence[int], nbytes: Sequence[int], seed: int, *, shuffle: bool = True, window_bytes: int = 256 << 20
    ) -> None:
        self.size = sum(chunks)
        self._chunks, self._nbytes = list(chunks), list(nbytes)
        self._starts = [0, *accumulate(self._chunks)]
        self._seed, self._shuffle, self._window_bytes = seed, shuffle, window_bytes
        self._epoch = lru_cache(maxsize=3)(self._arrange)

    def sample(self, position: int) -> int:
        """The sample (its number over all files) at a position of the endless row."""
        epoch, place = divmod(position, self.size)
        if not self._shuffle:
            return place
        starts, windows = self._epoch(epoch)
        number = bisect.bisect_right(starts, place) - 1
        permutation, members, ends = windows[number]
        place = permutation[place - starts[number]]
        which = bisect.bisect_right(ends, place)
        return self._starts[members[which]] + place - (ends[which - 1] if which else 0)

    def _arrange(self, epoch: int) -> tuple[list[int], list[tuple[Permutation, list[int], list[int]]]]:
        """The windows of an epoch: where each starts, its permutation, its chunks, and where those end in it."""
        chunks = [number for number, rows in enumerate(self._chunks) if rows]
        random.Random(f"{self._seed}/{epoch}").shuffle(chunks)
        groups: list[list[int]] = []
        filled = 0
        for chunk in chunks:
            if not groups or (filled + self._nbytes[chunk] > self._window_bytes and filled):
                groups.append([])
                filled = 0
            groups[-1].append(chunk)
            filled += self._nbytes[chunk]
        starts, windows, start = [], [], 0
        for number, members in enumerate(groups):
            ends = list(accumulate(self._chunks[chunk] for chunk in members))
            key = _mix(_mix(self._seed & _MASK) ^ (epoch << 20) ^ number)
            starts.append(start)
            windows.append((Permutation(ends[-1], key), members, ends))
            start += ends[-1]
        return starts, windows
