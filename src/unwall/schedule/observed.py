"""What ranks have measured of a pass, and what all of them decide by. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from unwall.schedule.activations import Choice, Link, Measured, choose, everywhere, scaled


class Observed(NamedTuple):
    """One pass of one rank."""

    size: int
    """Bytes that the first block was given: passes with more tokens have more."""
    blocks: tuple[Measured, ...]
    beyond_bytes: int
    """What the pass needed on the device besides its blocks and its states."""
    room_bytes: int
    """What there is for the blocks and that."""
    link: Link

    def best(self, ratio: float, room_bytes: int, link: Link) -> tuple[Choice, ...]:
        """The choices for a pass with ``ratio`` times the tokens."""
        left = room_bytes - int(self.beyond_bytes * max(1.0, ratio))
        blocks = self.scaled(ratio)
        return choose(blocks, left, link) if left > 0 else everywhere("recompute", blocks)

    def scaled(self, ratio: float) -> Sequence[Measured]:
        return self.blocks if ratio == 1.0 else scaled(self.blocks, ratio)


def worst(every: Sequence[Observed]) -> Observed:
    """What to decide by where ranks have measured different things: the most bytes, the least room, the mean of the seconds."""
    size = max(one.size for one in every)
    blocks = [one.scaled(size / one.size) for one in every]
    merged = tuple(
        Measured(max(b.kept_bytes for b in at), max(b.input_bytes for b in at), sum(b.seconds for b in at) / len(at))
        for at in zip(*blocks, strict=True)
    )
    link = replace(
        every[0].link,
        bytes_per_second=min(one.link.bytes_per_second for one in every),
        host_bytes=min(one.link.host_bytes for one in every),
    )
    return Observed(size, merged, max(one.beyond_bytes for one in every), min(one.room_bytes for one in every), link)


def is_met(number: int, measured: int) -> bool:
    """Whether ranks exchange what they measured when this pass begins: the first one is 1, ``measured`` are measured."""
    return number == measured + 1 or (number > 1 and number & (number - 1) == 0)
