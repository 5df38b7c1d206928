"""What becomes of each block's activations between forward and backward. Pure decisions over what was measured.

[Note: which blocks]
Four choices per block. Kept, its saved tensors stay on the device. Moved, they wait on the host and come back. Recomputed, only
its input stays, and its forward runs again in backward. With ``"host"`` that input waits on the host, too. Recomputing costs
the block's forward; moving costs nothing for as long as the link has carried it away when forward ends, and back when backward
needs it.

Memory is needed most where backward is about to use a block: all blocks before it still hold what they hold, and its own saved
tensors are there, whatever was chosen for it. Blocks after it are gone. So the last blocks are the best ones to keep, and where
one block alone is too much nothing helps.

``choose`` finds the fastest choices that fit, exactly as far as bytes are whole units (``UNITS`` of the budget; bytes are
rounded up): block after block it keeps, for each number of units held and moved so far, the fewest seconds recomputed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Table: TypeAlias = npt.NDArray[Any]
Choice: TypeAlias = Literal["keep", "move", "recompute", "host"]
CHOICES: tuple[Choice, ...] = ("keep", "move", "recompute", "host")
"""In the order of preference, where they cost the same."""
UNITS = 1024
MOVED_UNITS = 64
BACKWARD = 2.0
"""Backward takes about twice as long as forward."""


class Measured(NamedTuple):
    """One block of one pass."""

    kept_bytes: int
    """What autograd saves of it."""
    input_bytes: int
    """What must be held to compute it again."""
    seconds: float
    """Its forward."""


@dataclass(frozen=True)
class Link:
    """The way to the host. Without bandwidth or room nothing moves."""

    bytes_per_second: float = 0.0
    """In each direction."""
    host_bytes: int = 0
    """What may wait there."""
    flight_bytes: int = 0
    """What is on its way takes so much of the device."""
    busy_forward_seconds: float = 0.0
    """What else leaves the device during forward takes so long."""
    busy_backward_seconds: float = 0.0
    """What else comes to the device during backward takes so long."""
    whole_blocks: bool = True
    """Whether all that a block has saved may move. Otherwise only inputs do."""


NO_LINK = Link()


def choose(blocks: Sequence[Measured], budget_bytes: int, link: Link = NO_LINK) -> tuple[Choice, ...]:
    """The choice for each block with which a step is fastest inside ``budget_bytes``. See [Note: which blocks].

    Where none fits, the one that needs least."""
    if peak_bytes(blocks, everywhere("keep", blocks)) <= budget_bytes:
        return everywhere("keep", blocks)
    still = _best(blocks, budget_bytes, NO_LINK)
    moving = _best(blocks, budget_bytes - link.flight_bytes, link) if link.bytes_per_second and link.host_bytes > 0 else None
    found = [choices for choices in (still, moving) if choices is not None]
    if found:
        return min(found, key=lambda choices: extra_seconds(blocks, choices, link))
    fits_host = 0 < sum(block.input_bytes for block in blocks) <= link.host_bytes and link.bytes_per_second
    return everywhere("host" if fits_host else "recompute", blocks)


def everywhere(choice: Choice, blocks: Sequence[Measured]) -> tuple[Choice, ...]:
    """The same choice for each block."""
    return (choice,) * len(blocks)


def peak_bytes(blocks: Sequence[Measured], choices: Sequence[Choice]) -> int:
    """What the blocks hold on the device at most, without what is on its way."""
    held = most = 0
    for block, choice in zip(blocks, choices, strict=True):
        most = max(most, held + _working(block))
        held += held_bytes(block, choice)
    return max(most, held)


def moved_bytes(blocks: Sequence[Measured], choices: Sequence[Choice]) -> int:
    """What goes to the host, and comes back."""
    return sum(_moved(block, choice) for block, choice in zip(blocks, choices, strict=True))


def extra_seconds(blocks: Sequence[Measured], choices: Sequence[Choice], link: Link = NO_LINK) -> float:
    """How much longer a step takes than with everything kept."""
    pairs = list(zip(blocks, choices, strict=True))
    again = sum(_again(block, choice) for block, choice in pairs)
    moved = sum(_moved(block, choice) for block, choice in pairs)
    return _total(again, moved, sum(block.seconds for block in blocks), link)


def scaled(blocks: Sequence[Measured], ratio: float) -> list[Measured]:
    """The same blocks with another number of tokens."""
    return [Measured(int(b.kept_bytes * ratio) + 1, int(b.input_bytes * ratio) + 1, b.seconds * ratio) for b in blocks]


def _working(block: Measured) -> int:
    """What is there while backward uses the block."""
    return max(block.kept_bytes, block.input_bytes)


def held_bytes(block: Measured, choice: Choice) -> int:
    """What a block holds on the device from its forward to its backward."""
    return {"keep": block.kept_bytes, "move": 0, "recompute": block.input_bytes, "host": 0}[choice]


def _moved(block: Measured, choice: Choice) -> int:
    return {"keep": 0, "move": block.kept_bytes, "recompute": 0, "host": block.input_bytes}[choice]


def _again(block: Measured, choice: Choice) -> float:
    return block.seconds if choice in ("recompute", "host") else 0.0


def _total(again: float, moved: int, forward: float, link: Link) -> float:
    """Recomputed seconds, and what the link is waited for."""
    if not moved:
        return again
    carried = moved / link.bytes_per_second
    waited = max(0.0, carried + link.busy_forward_seconds - forward)
    backward = BACKWARD * forward + again
    return again + waited + max(0.0, carried + link.busy_backward_seconds - backward)


def _best(blocks: Sequence[Measured], budget_bytes: int, link: Link) -> tuple[Choice, ...] | None:
    """None where nothing fits."""
    if budget_bytes <= 0:
        return None
    unit = -(-budget_bytes // UNITS)
    room = budget_bytes // unit
    movable = min(link.host_bytes, sum(_working(block) for block in blocks))
    moved_unit = max(1, -(-movable // MOVED_UNITS))
    columns = movable // moved_unit + 1
    seconds = np.zeros((1, 1))  # grows with what can be reached: beyond it nothing is possible
    picks: list[Table] = []
    for block in blocks:
        fits = room - -(-_working(block) // unit)
        if fits < 0:
            return None
        usable = [
            (code, -(-held_bytes(block, choice) // unit), -(-_moved(block, choice) // moved_unit), _again(block, choice))
            for code, choice in enumerate(CHOICES)
            if choice != "move" or link.whole_blocks
        ]
        usable = [each for each in usable if each[1] <= room and each[2] < columns]
        seconds, pick = _after(seconds[: fits + 1], usable, room + 1, columns)
        picks.append(pick)
    return _followed_back(blocks, seconds, picks, link, unit, moved_unit)


def _after(before: Table, usable: Sequence[tuple[int, int, int, float]], rows: int, columns: int) -> tuple[Table, Table]:
    """The table behind one more block, and what was chosen for the block at each place of it: the first of the fastest.

    ``usable``: for each choice its code, the units that it holds and moves, and the seconds that it takes. numpy, not torch:
    threads that wait for each other over tables as small as these cost more than they save."""
    shape = (
        min(rows, before.shape[0] + max((down for _, down, _, _ in usable), default=0)),
        min(columns, before.shape[1] + max((right for _, _, right, _ in usable), default=0)),
    )
    best, pick = np.full(shape, np.inf), np.zeros(shape, dtype=np.int8)
    for code, down, right, again in usable:
        after = before[: shape[0] - down, : shape[1] - right] + again
        here = slice(down, down + after.shape[0]), slice(right, right + after.shape[1])
        np.copyto(pick[here], np.int8(code), where=after < best[here])
        np.minimum(best[here], after, out=best[here])
    return best, pick


def _followed_back(
    blocks: Sequence[Measured], seconds: Table, picks: list[Table], link: Link, unit: int, moved_unit: int
) -> tuple[Choice, ...] | None:
    """The choices that lead to the fastest of all ends."""
    forward = sum(block.seconds for block in blocks)
    least, ends = math.inf, (0, 0)
    for column in range(seconds.shape[1]):
        row = int(seconds[:, column].argmin())
        total = _total(float(seconds[row, column]), column * moved_unit, forward, link)
        if total < least:
            least, ends = total, (row, column)
    if least == math.inf:
        return None
    row, column = ends
    choices: list[Choice] = []
    for block, pick in zip(reversed(blocks), reversed(picks), strict=True):
        choice = CHOICES[int(pick[row, column])]
        choices.append(choice)
        row -= -(-held_bytes(block, choice) // unit)
        column -= -(-_moved(block, choice) // moved_unit)
    return tuple(reversed(choices))
