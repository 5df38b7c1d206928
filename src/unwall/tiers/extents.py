"""Which bytes of a file are free: a pure free list of aligned extents."""

import bisect
from dataclasses import dataclass

from unwall.tiers.sizes import ALIGNMENT, align_up


@dataclass(frozen=True, order=True)
class Extent:
    """A run of bytes in a file."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class FreeList:
    """Hands out aligned extents of a growing file and takes them back.

    Best fit, neighbours merged at once. A request that no single hole can hold is served from several holes, largest
    first, so a request succeeds whenever enough bytes are free: holes never become waste, however the sizes churn.
    """

    def __init__(self, size_bytes: int = 0) -> None:
        self._holes: list[Extent] = []  # by offset, never touching each other
        self._size_bytes = 0
        self.grow(size_bytes)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def free_bytes(self) -> int:
        return sum(hole.nbytes for hole in self._holes)

    @property
    def holes(self) -> tuple[Extent, ...]:
        return tuple(self._holes)

    def grow(self, nbytes: int) -> None:
        """The file became ``nbytes`` longer."""
        if nbytes % ALIGNMENT:
            raise ValueError(f"a file grows by multiples of {ALIGNMENT} bytes, got {nbytes}")
        if nbytes:
            self._insert(Extent(self._size_bytes, nbytes))
            self._size_bytes += nbytes

    def shortage(self, nbytes: int) -> int:
        """By how many bytes the file must grow before ``nbytes`` can be taken."""
        return max(0, align_up(nbytes) - self.free_bytes)

    def take(self, nbytes: int) -> tuple[Extent, ...]:
        """Extents of ``nbytes`` in all (rounded up to the alignment). ValueError when fewer are free: grow first."""
        if nbytes <= 0:
            raise ValueError(f"an extent has at least one byte, got {nbytes}")
        wanted = align_up(nbytes)
        if wanted > self.free_bytes:
            raise ValueError(f"{wanted} bytes wanted, {self.free_bytes} free")
        fitting = [hole for hole in self._holes if hole.nbytes >= wanted]
        if fitting:
            return (self._carve(min(fitting, key=lambda hole: (hole.nbytes, hole.offset)), wanted),)
        taken: list[Extent] = []
        for hole in sorted(self._holes, key=lambda hole: (-hole.nbytes, hole.offset)):
            piece = self._carve(hole, min(hole.nbytes, wanted))
            taken.append(piece)
            wanted -= piece.nbytes
            if wanted == 0:
                break
        return tuple(taken)

    def give_back(self, extents: tuple[Extent, ...]) -> None:
        """Returns extents that ``take`` gave. ValueError for what is free already (a double free) or outside the file."""
        for extent in extents:
            self._check_taken(extent)
            self._insert(extent)

    def _check_taken(self, extent: Extent) -> None:
        if extent.offset < 0 or extent.end > self._size_bytes:
            raise ValueError(f"{extent} lies outside the file of {self._size_bytes} bytes")
        at = bisect.bisect_right(self._holes, extent.offset, key=lambda hole: hole.offset)
        neighbours = self._holes[max(0, at - 1) : at + 1]
        if any(hole.offset < extent.end and extent.offset < hole.end for hole in neighbours):
            raise ValueError(f"{extent} is free already (freed twice?)")

    def _carve(self, hole: Extent, nbytes: int) -> Extent:
        at = self._holes.index(hole)
        rest = Extent(hole.offset + nbytes, hole.nbytes - nbytes)
        self._holes[at : at + 1] = [rest] if rest.nbytes else []
        return Extent(hole.offset, nbytes)

    def _insert(self, extent: Extent) -> None:
        at = bisect.bisect_left(self._holes, extent)
        offset, end = extent.offset, extent.end
        first = last = at
        if at > 0 and self._holes[at - 1].end == offset:
            first, offset = at - 1, self._holes[at - 1].offset
        if at < len(self._holes) and self._holes[at].offset == end:
            last, end = at + 1, self._holes[at].end
        self._holes[first:last] = [Extent(offset, end - offset)]
