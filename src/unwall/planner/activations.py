"""What becomes of activations in a step that is predicted: the choice for each block, bytes per tier, FLOPs.

[Note: predicted blocks]
The engine measures what autograd saves of each block, and schedule/activations.py decides. Here the same decision runs over
what the description says of the blocks ([Note: what a matrix costs]), with the machine's link and the seconds of its compute.
Backward needs the most where it is about to use a block: all blocks before it hold what they hold, its own activations are
there. Or at the end of forward: all blocks hold what they hold, and what lies beside them (the head, its logits) is there, too.

With sequence tiles the inside of an MLP is not saved, and computed again tile by tile: one tile of it is there at a time.
"""

from dataclasses import dataclass

from unwall.planner.description import Description, Part
from unwall.planner.pace import Pace
from unwall.planner.workload import Workload
from unwall.runtime.link_speed import SHARE as LINK_SHARE
from unwall.runtime.link_speed import WHOLE_BLOCKS
from unwall.runtime.saved_on_host import SavedOnHost
from unwall.schedule.activations import (
    CHOICES,
    NO_LINK,
    Choice,
    Link,
    Measured,
    choose,
    everywhere,
    held_bytes,
    moved_bytes,
    peak_bytes,
)

REPEATED: tuple[Choice, ...] = ("recompute", "host")


@dataclass(frozen=True)
class Activations:
    """Of one pass of one rank. See [Note: predicted blocks]."""

    blocks: tuple[Measured, ...]
    choices: tuple[Choice, ...]
    """For each block, in order."""
    beside_bytes: int
    """What stays for backward beside the blocks."""
    tile_bytes: int = 0
    """The inside of an MLP of one sequence tile, where those are used."""

    @property
    def device_bytes(self) -> int:
        """At most."""
        held = sum(held_bytes(*pair) for pair in zip(self.blocks, self.choices, strict=True))
        return max(peak_bytes(self.blocks, self.choices) + self.tile_bytes, held + self.beside_bytes)

    @property
    def host_bytes(self) -> int:
        """What waits there, and moves twice in a pass."""
        return moved_bytes(self.blocks, self.choices)

    def count(self, choice: Choice) -> int:
        """How many blocks were decided so."""
        return sum(each == choice for each in self.choices)

    def repeats(self, block: int | None) -> bool:
        """Whether a block's forward runs again in backward."""
        return block is not None and self.choices[block] in REPEATED

    def moved_of(self, block: int) -> int:
        """What of a block goes to the host and comes back."""
        return moved_bytes(self.blocks[block : block + 1], self.choices[block : block + 1])


def activations_of(
    description: Description, load: Workload, room_bytes: int | None = None, link: Link = NO_LINK, pace: Pace | None = None
) -> Activations:
    """What the workload's choice makes of the model. ``room_bytes``, of the device, and ``link`` are what ``"auto"`` decides
    by; None: there is room for everything."""
    blocks, beside = blocks_of(description, load, pace), beside_bytes(description, load)
    parts = [part for part in description.parts if part.is_block]
    tile = max((_inside(part, load) for part in parts), default=0) // load.sequence_tiles if load.sequence_tiles > 1 else 0
    if load.activations != "auto":
        return Activations(blocks, everywhere(load.activations, blocks), beside, tile)
    kept = Activations(blocks, everywhere("keep", blocks), beside, tile)
    if room_bytes is None or kept.device_bytes <= room_bytes:
        return kept
    # Where forward ends all is held and the head is there: tried with less and less room until that fits, too.
    found, left = kept, room_bytes - tile
    for _ in range(16):
        found = Activations(blocks, choose(blocks, max(0, left), link), beside, tile)
        if found.device_bytes <= room_bytes or left <= 0:
            break
        left -= max(found.device_bytes - room_bytes, room_bytes // 64 + 1)
    return found


def blocks_of(description: Description, load: Workload, pace: Pace | None = None) -> tuple[Measured, ...]:
    """Each block as the engine would measure it. Without a pace seconds are FLOPs: enough to compare blocks."""
    found: list[Measured] = []
    for part in description.parts:
        if part.is_block:
            inside = _inside(part, load) if load.sequence_tiles > 1 else 0
            kept = _tokens(load) * (part.token_numel + part.pair_numel * load.seq) - inside
            seconds = forward_flops(part, load)
            if pace is not None:
                seconds = seconds / pace.block_flops_per_s + pace.s_per_param * part.numel
            found += [Measured(kept, _tokens(load) * part.boundary_numel, seconds)] * part.count
    return tuple(found)


def beside_bytes(description: Description, load: Workload) -> int:
    """What parts that are no blocks leave for backward."""
    return sum(
        part.count * _tokens(load) * (part.token_numel + part.pair_numel * load.seq)
        for part in description.parts
        if not part.is_block
    )


def _tokens(load: Workload) -> int:
    """Bytes of one number for each token of a pass."""
    return load.item_bytes * load.batch * load.seq


def _inside(part: Part, load: Workload) -> int:
    return _tokens(load) * part.inside_numel


def forward_flops(part: Part, load: Workload) -> float:
    """Of one block, or what lies beside them."""
    return load.batch * load.seq * (2.0 * part.active_numel + part.pair_flops * load.seq)


def flops_of(description: Description, load: Workload, found: Activations) -> float:
    """One pass: forward, backward (twice forward), what is recomputed, and MLPs once more with sequence tiles."""
    total = description.flops(load.batch, load.seq)
    block = 0
    for part in description.parts:
        if part.is_block:
            repeated = sum(found.repeats(number) for number in range(block, block + part.count))
            total += repeated * forward_flops(part, load)
            if load.sequence_tiles > 1:
                total += part.count * 2.0 * load.batch * load.seq * part.inside_active_numel
            block += part.count
    return total


def inside_shares(description: Description) -> list[float]:
    """For each block: how much of its forward runs in sequence tiles."""
    parts = [part for part in description.parts if part.is_block]
    return [part.inside_active_numel / max(1, part.active_numel) for part in parts for _ in range(part.count)]


def link_of(pace: Pace, room_bytes: int, host_bytes: int, fetched_bytes: float) -> Link:
    """The way to the host as the engine would measure it. ``fetched_bytes``: of parameters, in backward."""
    rates = pace.ceilings
    speed = LINK_SHARE * min(rates.host_to_device_bytes_per_s, rates.device_to_host_bytes_per_s)
    flight = SavedOnHost.flight_of(room_bytes)
    return Link(speed, max(0, host_bytes), flight, 0.0, fetched_bytes / speed, whole_blocks=pace.is_host or WHOLE_BLOCKS)


def words(found: Activations) -> str:
    """``20 of 80 blocks kept, 60 recomputed``; ``kept`` where all are."""
    said: dict[Choice, str] = {
        "keep": "kept",
        "move": "moved to the host",
        "recompute": "recomputed",
        "host": "recomputed from inputs on the host",
    }
    there = [choice for choice in CHOICES if found.count(choice)]
    if len(there) <= 1:
        return said[there[0]] if there else said["keep"]
    first, *others = [f"{found.count(choice)} {said[choice]}" for choice in there]
    head, _, rest = first.partition(" ")
    return ", ".join([f"{head} of {len(found.choices)} blocks {rest}", *others])
