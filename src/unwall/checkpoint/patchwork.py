"""A tensor made of boxes of other tensors, without any memory.

``transformers`` says how weights on disk become weights of a model as operations on tensors: stack, cat, chunk, transpose,
reshape. Given patchworks instead of tensors, the same operations tell which element comes from where ([Note: matches] in
match.py), and nothing is moved.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unwall.checkpoint.match import Match, row_major


@dataclass(frozen=True)
class Patch:
    """A box of a patchwork, and the elements of another tensor that are in it."""

    at: tuple[int, ...]
    """Where the box begins."""
    shape: tuple[int, ...]
    source: str
    start: int
    """The first element, counted in the flattened source."""
    strides: tuple[int, ...]

    def narrow(self, dim: int, low: int, high: int) -> "Patch | None":
        """The part between two coordinates of the patchwork, which begins at the first of them."""
        first, last = max(self.at[dim], low), min(self.at[dim] + self.shape[dim], high)
        if first >= last:
            return None
        return Patch(
            _with(self.at, dim, first - low),
            _with(self.shape, dim, last - first),
            self.source,
            self.start + (first - self.at[dim]) * self.strides[dim],
            self.strides,
        )

    def insert(self, dim: int, at: int = 0) -> "Patch":
        """A further dimension of one element."""
        return replace(
            self,
            at=(*self.at[:dim], at, *self.at[dim:]),
            shape=(*self.shape[:dim], 1, *self.shape[dim:]),
            strides=(*self.strides[:dim], 0, *self.strides[dim:]),
        )

    def remove(self, dim: int) -> "Patch":
        """Without a dimension of one element."""
        return replace(self, at=_without(self.at, dim), shape=_without(self.shape, dim), strides=_without(self.strides, dim))


class Patchwork:
    """Behaves as a tensor as far as conversions of weights ask for it. NotImplementedError for whatever else."""

    def __init__(self, shape: Sequence[int], patches: Sequence[Patch]) -> None:
        self.shape = torch.Size(shape)
        self.patches = tuple(patches)

    @classmethod
    def whole(cls, source: str, shape: Sequence[int]) -> "Patchwork":
        """A tensor as it is."""
        shape = tuple(shape)
        return cls(shape, [Patch((0,) * len(shape), shape, source, 0, row_major(shape))] if math.prod(shape) else [])

    def matches(self) -> list[Match]:
        """What it is made of, with this tensor on the near side."""
        strides = row_major(self.shape)
        found = []
        for patch in self.patches:
            first = sum(at * stride for at, stride in zip(patch.at, strides, strict=True))
            found.append(Match(patch.shape, first, strides, patch.source, patch.start, patch.strides).simplified())
        return found

    # -- what conversions use of a tensor -----------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def contiguous(self) -> "Patchwork":
        return self

    def narrow(self, dim: int, start: int, length: int) -> "Patchwork":
        dim %= self.ndim
        parts = (patch.narrow(dim, start, start + length) for patch in self.patches)
        return Patchwork(_with(self.shape, dim, length), [part for part in parts if part is not None])

    def chunk(self, chunks: int, dim: int = 0) -> "tuple[Patchwork, ...]":
        step = -(-self.shape[dim] // chunks)
        return tuple(self.narrow(dim, low, min(step, self.shape[dim] - low)) for low in range(0, self.shape[dim], step))

    def unbind(self, dim: int = 0) -> "tuple[Patchwork, ...]":
        return tuple(self.narrow(dim, index, 1).squeeze(dim) for index in range(self.shape[dim]))

    def squeeze(self, dim: int | None = None) -> "Patchwork":
        dims = range(self.ndim - 1, -1, -1) if dim is None else [dim % self.ndim]
        found = self
        for place in dims:
            if found.shape[place] == 1:
                found = Patchwork(_without(found.shape, place), [patch.remove(place) for patch in found.patches])
        return found

    def unsqueeze(self, dim: int) -> "Patchwork":
        dim %= self.ndim + 1
        return Patchwork((*self.shape[:dim], 1, *self.shape[dim:]), [patch.insert(dim) for patch in self.patches])

    def transpose(self, dim0: int, dim1: int) -> "Patchwork":
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        def turned(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[index] for index in order)

        patches = [replace(p, at=turned(p.at), shape=turned(p.shape), strides=turned(p.strides)) for p in self.patches]
        return Patchwork(turned(self.shape), patches)

    def reshape(self, *shape: Any) -> "Patchwork":
        wanted = _full_shape(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape, self.numel())
        if 0 in wanted:
            return Patchwork(wanted, [])
        found, dim = self, 0
        while dim < max(found.ndim, len(wanted)):
            if dim == found.ndim:
                found = found.unsqueeze(dim)
            if dim == len(wanted):
                found = found.squeeze(dim)
                continue
            while found.shape[dim] % wanted[dim] and dim + 1 < found.ndim:
                found = _merged(found, dim)
            if found.shape[dim] % wanted[dim]:
                raise ValueError(f"a tensor of shape {tuple(self.shape)} has no view of shape {wanted}")
            if found.shape[dim] != wanted[dim]:
                found = _split(found, dim, wanted[dim])
            dim += 1
        return found

    view = reshape

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        ways: dict[Any, Callable[..., Any]] = {
            torch.cat: _cat,
            torch.concat: _cat,
            torch.stack: _stack,
            torch.chunk: lambda input, chunks, dim=0: input.chunk(chunks, dim),
            torch.unbind: lambda input, dim=0: input.unbind(dim),
            torch.transpose: lambda input, dim0, dim1: input.transpose(dim0, dim1),
        }
        if func not in ways:
            raise NotImplementedError(f"weights are converted with {func}, which cannot be done piece by piece")
        return ways[func](*args, **(kwargs or {}))


def _cat(tensors: Sequence[Patchwork], dim: int = 0) -> Patchwork:
    dim %= tensors[0].ndim
    if len({_without(tensor.shape, dim) for tensor in tensors}) != 1:
        raise ValueError(f"tensors of shapes {[tuple(tensor.shape) for tensor in tensors]} cannot be joined along {dim}")
    patches, start = [], 0
    for tensor in tensors:
        patches += [replace(patch, at=_with(patch.at, dim, patch.at[dim] + start)) for patch in tensor.patches]
        start += tensor.shape[dim]
    return Patchwork(_with(tensors[0].shape, dim, start), patches)


def _stack(tensors: Sequence[Patchwork], dim: int = 0) -> Patchwork:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _split(tensor: Patchwork, dim: int, outer: int) -> Patchwork:
    """One dimension as two, the first with ``outer`` elements."""
    inner = tensor.shape[dim] // outer
    shape = (*tensor.shape[:dim], outer, inner, *tensor.shape[dim + 1 :])
    return Patchwork(shape, [part for patch in tensor.patches for part in _split_patch(patch, dim, inner)])


def _split_patch(patch: Patch, dim: int, inner: int) -> Iterator[Patch]:
    """A box may begin and end within a row of the new shape: then it becomes up to three."""
    low, high = patch.at[dim], patch.at[dim] + patch.shape[dim]
    borders = sorted({low, min(high, -(-low // inner) * inner), max(low, high // inner * inner), high})
    for first, last in itertools.pairwise(borders):
        rows, length = max(1, (last - first) // inner), min(inner, last - first)
        start = patch.start + (first - low) * patch.strides[dim]
        yield Patch(
            (*patch.at[:dim], first // inner, first % inner, *patch.at[dim + 1 :]),
            (*patch.shape[:dim], rows, length, *patch.shape[dim + 1 :]),
            patch.source,
            start,
            (*patch.strides[:dim], inner * patch.strides[dim], patch.strides[dim], *patch.strides[dim + 1 :]),
        )


def _merged(tensor: Patchwork, dim: int) -> Patchwork:
    """A dimension and the next as one."""
    outer, inner = tensor.shape[dim], tensor.shape[dim + 1]
    shape = (*tensor.shape[:dim], outer * inner, *tensor.shape[dim + 2 :])
    return Patchwork(shape, [part for patch in tensor.patches for part in _merged_patch(patch, dim, inner)])


def _merged_patch(patch: Patch, dim: int, inner: int) -> Iterator[Patch]:
    rows, length = patch.shape[dim], patch.shape[dim + 1]
    stride = patch.strides[dim + 1]
    together = length == inner and patch.strides[dim] == inner * stride
    for row in range(1 if together or rows == 1 else rows):
        yield Patch(
            (*patch.at[:dim], (patch.at[dim] + row) * inner + patch.at[dim + 1], *patch.at[dim + 2 :]),
            (*patch.shape[:dim], rows * length if together else length, *patch.shape[dim + 2 :]),
            patch.source,
            patch.start + row * patch.strides[dim],
            (*patch.strides[:dim], stride, *patch.strides[dim + 2 :]),
        )


def _full_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    known = math.prod(extent for extent in shape if extent != -1)
    return tuple(numel // max(1, known) if extent == -1 else extent for extent in shape)


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _without(values: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])
