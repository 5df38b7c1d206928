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
    first = last = -1  # of the run that may go on; a ``Run`` is made where it ends
    of_run: Hashable = None
    for segment in segments:
        if segment.slot not in keys:
            continue
        key, start = keys[segment.slot], segment.shard_start
        if first < 0 or not (key is of_run or key == of_run) or start - last >= gap:
            if first >= 0:
                found.append(Run(first, last, of_run))
            first, of_run = start, key
        last = start + segment.numel
    if first >= 0:
        found.append(Run(first, last, of_run))
    return found
