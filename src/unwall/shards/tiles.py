"""Which parameters can be read tile by tile, and where they are cut. Pure decisions.

[Note: tiles]
A tile is a range of rows of a parameter, seen as a matrix: the rows of a linear layer's weight (its output features) or of an
embedding, and those of all experts one below the other where a parameter holds several. Each tile is a group of its own, so it
is fetched, used and dropped, and its gradient reduced, by itself. Only operators that work on one tile at a time can read such
a parameter (runtime/tiling.py), so a parameter is tiled by itself only where its module is known to use nothing else.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from unwall.plans import Plan, PlanError
from unwall.shards.grouping import Cuts, uncut
from unwall.shards.local import is_distributed


def tileable(model: nn.Module) -> dict[int, nn.Parameter]:
    """The parameters (by id) that every module that owns them reads with an operator that knows tiles."""
    found: dict[int, nn.Parameter] = {}
    others: set[int] = set()
    for module, alone in _modules(model, True, set()):
        for name, param in module.named_parameters(recurse=False):
            if alone and not is_distributed(param) and _reads_in_tiles(module, name, param):
                found[id(param)] = param
            else:
                others.add(id(param))
    return {key: param for key, param in found.items() if key not in others}


def _modules(module: nn.Module, alone: bool, seen: set[tuple[int, bool]]) -> Iterator[tuple[nn.Module, bool]]:
    """Every module, and whether nobody but itself reads its parameters: a compiled module reads all below it as they are, and
    so does an attention that calls its projections' weights by itself."""
    compiled = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    alone = alone and not compiled and not isinstance(module, nn.MultiheadAttention | nn.RNNBase)
    if (id(module), alone) in seen:
        return
    seen.add((id(module), alone))
    yield module, alone
    for child in module.children():
        yield from _modules(child, alone, seen)


def _reads_in_tiles(module: nn.Module, name: str, param: nn.Parameter) -> bool:
    kind = type(module)
    if param.dim() == 2 and name == "weight" and param.is_floating_point():
        if kind.forward is nn.Linear.forward:
            return True
        if kind.forward is nn.Embedding.forward:
            return getattr(module, "max_norm", None) is None  # it writes to the weight
        return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers")
    stacked = param.dim() == 3 and param.shape[0] > 1 and param.is_floating_point()
    return stacked and not kind.__module__.startswith("torch.nn")


def cut_rows(shape: torch.Size, tiles: int) -> list[int]:
    """Where a parameter is cut into about so many tiles: positions inside the flattened parameter. Between experts, as long as
    there are no more tiles than experts."""
    if tiles <= 1 or len(shape) < 2:
        return []
    if len(shape) == 2 or tiles <= shape[0]:
        row, rows = math.prod(shape[1:]), shape[0]
        step = -(-rows // tiles)
        return [at * row for at in range(step, rows, step)]
    inside = cut_rows(shape[1:], -(-tiles // shape[0]))
    expert = math.prod(shape[1:])
    cuts = [start * expert + at for start in range(shape[0]) for at in [0, *inside]]
    return cuts[1:]


def most_tiles(shape: torch.Size) -> int:
    """Into how many tiles a parameter can be cut at most: one row each."""
    return math.prod(shape[:-1])


def forced(model: nn.Module, plan: Plan) -> Cuts:
    """The cuts that ``Plan(tiles=...)`` asks for. PlanError for a parameter that cannot be read in tiles."""
    if plan.tiles is None or plan.tiles == 1:
        return uncut
    able = tileable(model)

    def cuts(name: str, param: nn.Parameter) -> Sequence[int]:
        count = plan.tiles_of(name, param)
        if count is None or count == 1:
            return ()
        if id(param) not in able:
            if callable(plan.tiles):
                raise PlanError(
                    f"tiles: {name} cannot be read in tiles (got {count} for it): the weights of Linear, Embedding and stacked "
                    "experts can, where nothing else in the model reads them. Return 1 or None for it"
                )
            return ()
        return cut_rows(param.shape, min(count, most_tiles(param.shape)))

    return cuts
