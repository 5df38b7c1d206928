"""What comes and goes on device and host beside what the groups hold. Pure."""

from collections.abc import Sequence

from unwall.shards.home import Home, Sizes, device_bytes_of, state_bytes_on
from unwall.tiers.sizes import ALIGNMENT, align_up

CHUNK_ELEMENTS = 1 << 20
"""What an update of state on disk reads, updates and writes at a time, at most."""
CHUNKS_IN_FLIGHT = 6
RING_SLOTS = 4
RING_SLOT_BYTES = 8 << 20
TRANSIENT_GRADIENTS = 3
"""Of those that are not kept, on the host at once: one lands, one waits, one is used."""


def working_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """What comes and goes on the device: two groups gathered (where one ends and the next begins), two gradients, what they
    are reduced to, and one gradient in both widths while it moves to fp32. Packed parameters: of three groups, one that is
    needed and two that are fetched ahead. Or, where that is more, what calls inside calls read
    at once, and one gradient. It is enough for every order of uses: see [Note: room] in schedule/room.py."""
    moving = [
        size for size, home in zip(sizes, homes, strict=True) if not (size.whole if home.tier == "device" else home.resident)
    ]
    flats = sorted(size.flat_bytes for size in moving)
    grads = sorted(size.grad_flat_bytes for size in sizes)
    parts = sorted(size.grad_part_bytes for size in sizes)
    widening = max((size.widening_bytes for size in sizes), default=0)
    usual = sum(flats[-2:]) + sum(grads[-2:]) + sum(parts[-2:])
    nested = max((size.at_once_bytes for size in moving), default=0) + sum(grads[-1:]) + sum(parts[-1:])
    transits = sorted(transit_bytes_of(size, home) for size, home in zip(sizes, homes, strict=True))
    return max(usual, nested) + widening + sum(transits[-3:])


def transit_bytes_of(sizes: Sizes, home: Home) -> int:
    """What a gather of the group takes on its way. See [Note: packed gathers] in shards/packed_gather.py."""
    return 0 if home.params == "device" and sizes.whole else sizes.transit_bytes


def least_device_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """What is held, what comes and goes, and two more groups that are fetched ahead."""
    held = sum(device_bytes_of(size, home) for size, home in zip(sizes, homes, strict=True))
    return held + working_bytes(sizes, homes) + 2 * max(size.flat_bytes for size in sizes)


def chunk_elements(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """How much of a group's state an update of state on disk works on at a time: a sixteenth of a small model's largest group,
    so that reads, updates and writes overlap there, too."""
    largest = max((size.own_numel for size, home in zip(sizes, homes, strict=True) if home.on_disk), default=0)
    step = ALIGNMENT  # whole sectors in every representation, that of one byte included
    return min(CHUNK_ELEMENTS, align_up(-(-largest // 16), step)) if largest else 0


def ring_slot_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """A slot of the rings through which device and disk exchange bytes."""
    largest = max((max(s.shard_bytes, s.grad_bytes) for s, h in zip(sizes, homes, strict=True) if h.on_disk), default=0)
    return min(RING_SLOT_BYTES, align_up(-(-largest // RING_SLOTS))) if largest else ALIGNMENT


def host_working_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """What comes and goes on the host: gradients that are not kept and, because of the disk, chunks under update, the rings
    between disk and device, and one group's largest state while it is looked at whole."""
    passing = transient_bytes(sizes, homes)
    on_disk = [(size, home) for size, home in zip(sizes, homes, strict=True) if home.on_disk]
    if not on_disk:
        return passing
    total = passing + chunks_bytes(sizes, homes)
    crossings = {"params" for _, home in on_disk if home.params == "disk"} | {
        "grads" for _, home in on_disk if home.grads == "disk"
    }
    total += len(crossings) * RING_SLOTS * ring_slot_bytes(sizes, homes)
    return total + max(8 * size.own_numel for size, _ in on_disk)


def transient_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """Host memory that gradients go through which are not kept."""
    on_host = (size.transient_bytes for size, home in zip(sizes, homes, strict=True) if home.tier == "host")
    return TRANSIENT_GRADIENTS * max(on_host, default=0)


def chunks_bytes(sizes: Sequence[Sizes], homes: Sequence[Home]) -> int:
    """Host memory of all chunks under update at once."""
    elements = chunk_elements(sizes, homes)
    return CHUNKS_IN_FLIGHT * max(chunk_bytes(size, home, elements) for size, home in zip(sizes, homes, strict=True))


def chunk_bytes(size: Sizes, home: Home, elements: int) -> int:
    """Host memory of one chunk under update: of each state that lies on disk, ``elements``."""
    share = elements / max(1, size.own_numel)
    grads = size.grad_bytes + size.widening_bytes if home.grads == "disk" else 0
    held = (size.shard_bytes if home.params == "disk" else 0) + state_bytes_on("disk", size, home) + grads
    return align_up(int(held * share)) + 4 * ALIGNMENT if held else 0
