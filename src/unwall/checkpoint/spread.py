"""Which elements of a whole parameter a rank holds under tensor parallelism, in the words of boxes.py."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from unwall.checkpoint.boxed import within
from unwall.checkpoint.boxes import Box, Part
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.match import Match
from unwall.shards.dimensions import Others
from unwall.shards.local import is_distributed, local


def parts_of(param: torch.Tensor, start: int, numel: int) -> Iterator[Part]:
    """A run of elements of a parameter's local part, as parts of the whole parameter, in order."""
    if not is_distributed(param):
        yield Part(Box.whole(param.shape), start, numel)
        return
    at = 0
    for box in _boxes(param):
        low, high = max(start, at), min(start + numel, at + box.numel)
        if low < high:
            yield Part(box, low - at, high - low)
        at += box.numel


def writes(param: torch.Tensor, others: Others) -> bool:
    """Whether this rank writes its part: of those that hold the same elements the first one does."""
    if others.replicas is not None and others.replicas.rank:
        return False
    spread: set[str] = set()
    if is_distributed(param):
        mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
        names = mesh.mesh_dim_names or ()
        spread = {name for name, placed in zip(names, placements, strict=True) if not placed.is_replicate()}
    return all(dimension.ranks.rank == 0 for dimension in others.tensor if dimension.name not in spread)


def local_matches(tensor: torch.Tensor, matches: Iterable[Match]) -> list[Match]:
    """From matches whose near side is a whole tensor of the model to those of the part of it that this rank holds."""
    if not is_distributed(tensor):
        return list(matches)
    found, at, known = [], 0, list(matches)
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(tensor.shape)
    for box in _boxes(tensor):
        parts = (part for match in known for part in within(match, shape, box)) if box.numel else ()
        found += [replace(part, near_start=part.near_start + at) for part in parts]
        at += box.numel
    return found


def _boxes(param: torch.Tensor) -> list[Box]:
    """Boxes of the whole parameter that, end to end, are the local part. Packed weights are cut in several places."""
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(param.shape)
    strided = [(at, placed) for at, placed in enumerate(placements) if getattr(placed, "split_factor", 1) > 1]
    if not strided:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        return [Box(tuple(offsets), tuple(sizes))]
    at, placed = strided[0]
    pieces, ranks, here = placed.split_factor, mesh.size(at), mesh.get_local_rank(at)
    others = [other for index, other in enumerate(placements) if index != at]
    if shape[placed.dim] % (pieces * ranks) or not all(other.is_replicate() for other in others):
        raise CheckpointError(
            f"a parameter of shape {shape} is spread as {placements}, which checkpoints cannot describe: save "
            "model.state_dict()"
        )
    extent, outer = shape[placed.dim] // (pieces * ranks), shape[: placed.dim]
    found = []
    for index in itertools.product(*map(range, outer)):
        for piece in range(pieces):
            offsets = (*index, (piece * ranks + here) * extent, *(0 for _ in shape[placed.dim + 1 :]))
            found.append(Box(offsets, (*(1 for _ in outer), extent, *shape[placed.dim + 1 :])))
    assert sum(box.numel for box in found) == local(param).numel()
    return found
