"""Which runs of a group's owned elements are updated with the same numbers. Pure."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from unwall.shards.layout import Segment


@dataclass(frozen=True)
class Run:
    """Elements ``start`` to ``end`` of the owned run, all with one key."""

    start: int
    end: int
    key: Hashable


def runs_of(segments: Iterable[Segment], keys: Mapping[int, Hashable], gap: int) -> list[Run]:
    """Neighbouring segments with one key as single runs. ``keys``: by slot; a slot without a key is not updated.

    ``gap``: neighbours may be this many elements apart (the padding between two parameters, which is zero and stays so).
    """
    found: list[Run] = []
    for segment in segments:
        if segment.slot not in keys:
            continue
        key, start, end = keys[segment.slot], segment.shard_start, segment.shard_start + segment.numel
        if found and (found[-1].key is key or found[-1].key == key) and start - found[-1].end < gap:
            found[-1] = Run(found[-1].start, end, key)
        else:
            found.append(Run(start, end, key))
    return found
