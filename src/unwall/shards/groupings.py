"""The groups of a model and their layouts, for one plan and budget after the other. Allocates nothing.

[Note: each grouping once]
A search for a plan asks for the groups of one model again and again, under other budgets. How large a group may become changes
the groups only below the largest sum of bytes that was let pass: from there up to the limit itself all limits give the same
ones (``Limit`` in shards/grouping.py). So each grouping is worked out once, and found again by its range.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from unwall.plans import Plan
from unwall.shards.grouping import (
    BUDGET_SHARE,
    Cuts,
    Entry,
    Limit,
    Unit,
    build_groups,
    entries_of,
    group_bytes,
    note_calls,
    uncut,
)
from unwall.shards.layout import Layout, build_layout
from unwall.shards.local import copies_of, is_distributed, local
from unwall.shards.tiles import cut_rows, forced, most_tiles, tileable

Planned = list[tuple[Unit, Layout]]
_SMALLEST_TILE_BYTES = 64 << 10
_MOST_TILES = 4096


@dataclass(frozen=True)
class Kind:
    """Parameters of one kind share flat buffers."""

    dtype: torch.dtype
    trainable: bool
    exact: bool
    """The master needs more than the compute dtype holds, although the parameters are frozen."""
    copies: int | None = None
    """On how many tensor ranks each element of a DTensor is kept. None: plain parameters."""


def compute_dtype(plan: Plan, name: str, param: nn.Parameter, fp32_names: set[str]) -> torch.dtype:
    """fp32 parameters compute in the plan's dtype unless kept; others were given their dtype on purpose and keep it."""
    if param.dtype is not torch.float32 or name in fp32_names:
        return param.dtype
    if plan.keep_fp32 is not None and plan.keep_fp32(name, param):
        return param.dtype
    return plan.compute_dtype


def ignored(plan: Plan, name: str, param: nn.Parameter) -> bool:
    """Whether the plan leaves a parameter alone."""
    return plan.ignore is not None and bool(plan.ignore(name, param))


def fp32_names(model: nn.Module) -> set[str]:
    """Parameters of modules that keep running statistics in fp32: they compute in fp32, too."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            found |= {f"{name}.{own}" if name else own for own, _ in module.named_parameters(recurse=False)}
    return found


def plan_groups(
    model: nn.Module,
    plan: Plan,
    world_size: int,
    cuts: Cuts = uncut,
    limit_bytes: int | None = None,
    wanted: Callable[[Entry], bool] = lambda _: True,
    most_params: int | None = None,
) -> Planned:
    """The groups of a model and their layouts. ``cuts``: which parameters lie in several slots.
    ``limit_bytes``: how large a group may become at most, where that is less than the plan allows.

    ``wanted``: which parameters to group, where it is not all of them (but those that the plan ignores). ``most_params``: in
    one group."""
    entries = _entries(model, plan, cuts)
    limit = group_bytes(sum(entry.nbytes for entry in entries), plan.budget_device_bytes, _stays(plan, world_size))
    limit = limit if limit_bytes is None else min(limit, limit_bytes)
    units = build_groups(model, [entry for entry in entries if wanted(entry)], limit)
    if most_params is not None:
        units = [part for unit in units for part in _split(unit, most_params)]
    return _laid_out(model, units, world_size)


def _stays(plan: Plan, world_size: int) -> bool:
    """Whether nothing says that states should lie elsewhere than on the one device there is."""
    free = plan.params == plan.optimizer == "auto" and plan.device_bytes is None and plan.host_bytes is None
    return world_size == 1 and free


class Groupings:
    """The groups of one model under any budget. See [Note: each grouping once].

    Of the plan only dtypes, what it ignores, and whether it names tiers or budgets count."""

    def __init__(self, model: nn.Module, plan: Plan, world_size: int) -> None:
        self._model, self._plan, self._world_size = model, plan, world_size
        self._entries: dict[Cuts, list[Entry]] = {}
        self._found: dict[Cuts, list[tuple[int, int, Planned]]] = {}
        self._tileable: dict[int, nn.Parameter] | None = None
        self._tilings: dict[int, Cuts] = {}
        self._forced: dict[int, Cuts] = {}

    def planned(self, cuts: Cuts, budget_bytes: int | None, limit_bytes: int | None = None) -> Planned:
        """As :func:`plan_groups`. The same object wherever the groups are the same."""
        if cuts not in self._entries:
            self._entries[cuts] = _entries(self._model, self._plan, cuts)
        entries, known = self._entries[cuts], self._found.setdefault(cuts, [])
        stays = budget_bytes is None and _stays(self._plan, self._world_size)
        most = group_bytes(sum(entry.nbytes for entry in entries), budget_bytes, stays)
        most = most if limit_bytes is None else min(most, limit_bytes)
        for low, high, planned in known:
            if low <= most <= high:
                return planned
        limit = Limit(most)
        planned = _laid_out(self._model, build_groups(self._model, entries, limit), self._world_size)
        known.append((limit.passed_bytes, most, planned))
        return planned

    def tilings(self, budget_bytes: int) -> Iterator[Cuts]:
        """Cuts into smaller and smaller tiles, as far as there is something to cut."""
        if self._tileable is None:
            self._tileable = tileable(self._model)
        total = sum(param.numel() * param.element_size() for param in self._tileable.values())
        # Powers of two down to the same smallest one, whatever the budget is: less room is never accepted where more was
        # refused.
        smallest = max(_SMALLEST_TILE_BYTES, 1 << (total // _MOST_TILES).bit_length())
        limit = max(smallest, 1 << max(1, budget_bytes // BUDGET_SHARE).bit_length() - 1)
        while limit >= smallest and total:
            if limit not in self._tilings:
                self._tilings[limit] = _tiles_of(self._plan, self._tileable, fp32_names(self._model), limit)
            yield self._tilings[limit]
            limit //= 2

    def forced(self, plan: Plan) -> Cuts:
        """The cuts that ``Plan(tiles=...)`` asks for."""
        if not isinstance(plan.tiles, int):
            return forced(self._model, plan)
        if plan.tiles not in self._forced:
            self._forced[plan.tiles] = forced(self._model, plan)
        return self._forced[plan.tiles]


def _tiles_of(plan: Plan, able: dict[int, nn.Parameter], kept: set[str], limit_bytes: int) -> Cuts:
    def cuts(name: str, param: nn.Parameter) -> Sequence[int]:
        if id(param) not in able:
            return ()
        nbytes = param.numel() * compute_dtype(plan, name, param, kept).itemsize
        return cut_rows(param.shape, min(-(-nbytes // limit_bytes), most_tiles(param.shape)))

    return cuts


def _entries(model: nn.Module, plan: Plan, cuts: Cuts) -> list[Entry]:
    """The parameters that are to be grouped."""
    kept = fp32_names(model)

    def kind(name: str, param: nn.Parameter) -> tuple[Hashable, torch.dtype]:
        dtype = compute_dtype(plan, name, param, kept)
        copies = copies_of(param, 1) if is_distributed(param) else None
        exact = param.dtype is torch.float32 and dtype is torch.bfloat16
        return Kind(dtype, param.requires_grad, exact, copies), dtype

    entries = [entry for entry in entries_of(model, kind, cuts) if not ignored(plan, entry.name, entry.param)]
    if not entries:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    return entries


def _laid_out(model: nn.Module, units: list[Unit], world_size: int) -> Planned:
    note_calls(model, units)
    _note_tied(model, units)
    return [(unit, _layout(unit, world_size)) for unit in units]


def _note_tied(model: nn.Module, units: list[Unit]) -> None:
    parts = [unit for unit in units if unit.is_part]
    if parts:
        owners = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
        for unit in parts:
            unit.several = owners[id(unit.entries[0].param)] > 1


def _split(unit: Unit, most_params: int) -> list[Unit]:
    starts = range(0, len(unit.entries), most_params)
    return [Unit(unit.name, unit.entries[start : start + most_params]) for start in starts]


def _layout(unit: Unit, world_size: int) -> Layout:
    kind = unit.entries[0].kind
    assert isinstance(kind, Kind)
    names = [entry.name for entry in unit.entries]
    shapes = [local(entry.param).shape for entry in unit.entries]
    return build_layout(names, shapes, kind.dtype, world_size, [entry.part for entry in unit.entries])
