"""What ranks have measured of a pass, and what all of them decide by. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from unwall.schedule.activations import Choice, Link, Measured, choose, everywhere, held_bytes, peak_bytes, scaled


class Observed(NamedTuple):
    """One pass of one rank."""

    size: int
    """Bytes that the first block was given: passes with more tokens have more."""
    blocks: tuple[Measured, ...]
    beyond_bytes: int
    """What the pass needed on the device besides its blocks and its states, in their backward."""
    room_bytes: int
    """What there is for the blocks and that."""
    link: Link
    loss_bytes: int = 0
    """The same before that: when forward has ended, and all blocks hold what they hold."""

    def best(self, ratio: float, room_bytes: int, link: Link) -> tuple[Choice, ...]:
        """The choices for a pass with ``ratio`` times the tokens."""
        left = room_bytes - self._grown(self.beyond_bytes, ratio)
        if left <= 0:
            return everywhere("recompute", self.blocks)
        loss = Measured(max(0, self._grown(self.loss_bytes - self.beyond_bytes, ratio)), 0, 0.0)  # as if it were one more block
        return choose([*self.scaled(ratio), loss], left, link)[:-1]

    def needed_bytes(self, ratio: float, choices: Sequence[Choice]) -> int:
        """What such a pass needs at most, its blocks and all besides them."""
        held = sum(held_bytes(*pair) for pair in zip(self.scaled(ratio), choices, strict=True))
        return max(self.in_blocks_bytes(ratio, choices), held + self._grown(self.loss_bytes, ratio))

    def in_blocks_bytes(self, ratio: float, choices: Sequence[Choice]) -> int:
        """The same while backward is in the blocks."""
        return peak_bytes(self.scaled(ratio), choices) + self._grown(self.beyond_bytes, ratio)

    @staticmethod
    def _grown(nbytes: int, ratio: float) -> int:
        return int(nbytes * max(1.0, ratio))

    def scaled(self, ratio: float) -> Sequence[Measured]:
        return self.blocks if ratio == 1.0 else scaled(self.blocks, ratio)


def worst(found: Sequence[Observed | None]) -> Observed | None:
    """What to decide by where ranks have measured different things: the most bytes, the least room, the mean of the seconds.
    None: no rank has measured anything."""
    every = [one for one in found if one is not None]
    if not every:
        return None
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
    beyond, loss = max(one.beyond_bytes for one in every), max(one.loss_bytes for one in every)
    return Observed(size, merged, beyond, min(one.room_bytes for one in every), link, loss)


def is_met(number: int, measured: int) -> bool:
    """Whether ranks exchange what they measured when this pass begins: the first one is 1, ``measured`` are measured."""
    return number == measured + 1 or (number > 1 and number & (number - 1) == 0)
