"""Which parameters move together: groups from a module's structure. Pure decisions over a description of the module."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from unwall.shards.local import local

GROUPS_WANTED = 16
"""A model is cut into at least about this many groups, so that what is in use at once is a small part of it."""
GROUP_BYTES_MAX = 512 << 20
"""Large enough that links and collectives run at full speed, small enough for several to be in flight."""
GROUP_BYTES_MIN = 16 << 10
GROUP_BYTES_STAYING = 4 << 20
"""The same where nothing has to leave the device: what a group costs in Python and launches is more than it takes."""
BUDGET_SHARE = 8
"""A group takes at most this fraction of ``device_bytes``: one in use, its gradients, the next ones on their way."""


@dataclass
class Entry:
    """A parameter as grouping sees it."""

    name: str
    param: nn.Parameter
    kind: Hashable
    """Only parameters of one kind (dtype, trainable or not) share a flat buffer."""
    nbytes: int
    part: range | None = None
    """Which elements of the flattened parameter; None: all of them. Parts of one parameter may lie in several groups."""

    @property
    def label(self) -> str:
        return self.name if self.part is None else f"{self.name}[{self.part.start}:{self.part.stop}]"


@dataclass
class Unit:
    """A part of the module tree that stays together."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    at_once: frozenset[int] = frozenset()
    """Groups that are gathered at once where a module of this one runs, this one among them: see ``note_calls``."""
    several: bool = False
    """A part of a parameter that several modules share: its gradient may land once for each of them."""

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    @property
    def is_part(self) -> bool:
        """A range of one parameter, and nothing else."""
        return self.entries[0].part is not None


def group_bytes(total_bytes: int, budget_bytes: int | None, stays: bool = False) -> int:
    """How large a group may become. ``stays``: on the device, as far as one can tell."""
    least = GROUP_BYTES_STAYING if stays else GROUP_BYTES_MIN
    limit = min(max(total_bytes // GROUPS_WANTED, least), GROUP_BYTES_MAX)
    return limit if budget_bytes is None else max(1, min(limit, budget_bytes // BUDGET_SHARE))


class Limit:
    """How large a group may become. Notes the largest sum of bytes that it let pass: a limit between the two gives the same
    groups."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.passed_bytes = nbytes, 0

    def holds(self, nbytes: int) -> bool:
        if nbytes > self.nbytes:
            return False
        self.passed_bytes = max(self.passed_bytes, nbytes)
        return True


Cuts = Callable[[str, nn.Parameter], Sequence[int]]
"""Where a parameter is cut into parts: positions inside the flattened (local) parameter, in rising order."""


def uncut(name: str, param: nn.Parameter) -> Sequence[int]:  # noqa: ARG001
    """Every parameter stays whole."""
    return ()


def entries_of(
    module: nn.Module, kind: Callable[[str, nn.Parameter], tuple[Hashable, torch.dtype]], cuts: Cuts = uncut
) -> list[Entry]:
    """Every parameter once, or each of its parts, in registration order, under its first name (a tied one has several)."""
    found = []
    for name, param in module.named_parameters():
        key, dtype = kind(name, param)
        numel, places = local(param).numel(), list(cuts(name, param))
        if not places:
            found.append(Entry(name, param, key, numel * dtype.itemsize))
            continue
        edges = [0, *places, numel]
        if edges != sorted(set(edges)):
            raise ValueError(f"{name} has {numel} elements and cannot be cut at {places}: rising positions inside are needed")
        for start, stop in itertools.pairwise(edges):
            found.append(Entry(name, param, key, (stop - start) * dtype.itemsize, range(start, stop)))
    return found


def build_groups(module: nn.Module, entries: list[Entry], limit: int | Limit) -> list[Unit]:
    """Cuts a model into groups of at most ``limit`` bytes, or of one module's own parameters where those are larger.

    The module tree decides: a subtree that fits is kept whole, a larger one is cut at its children; small neighbours of one
    kind are then joined. So a transformer block becomes one group, a huge one several, and all norms kept in fp32 one.
    """
    limit = limit if isinstance(limit, Limit) else Limit(limit)
    units: list[Unit] = []
    left: dict[int, list[Entry]] = {}
    for entry in entries:
        left.setdefault(id(entry.param), []).append(entry)
    _cut(module, "", left, limit, units)
    by_kind: dict[Hashable, list[Unit]] = {}
    for unit in units:
        for entry in unit.entries:
            parts = by_kind.setdefault(entry.kind, [])
            if not parts or parts[-1].name != unit.name:
                parts.append(Unit(unit.name))
            parts[-1].entries.append(entry)
    groups: list[Unit] = []
    for parts in by_kind.values():
        groups += _join_small([part for part in parts if not part.is_part], limit)
        groups += [part for part in parts if part.is_part]  # what is read alone is fetched alone
    order = {entry.label: position for position, entry in enumerate(entries)}
    return sorted(groups, key=lambda unit: order[unit.entries[0].label])


def _cut(module: nn.Module, name: str, left: dict[int, list[Entry]], limit: Limit, units: list[Unit]) -> None:
    inside = [entry for param in module.parameters() for entry in left.get(id(param), ())]
    if not inside:
        return
    # Where all are parts, they are units of their own wherever the module is cut.
    last = next(module.children(), None) is None or all(entry.part is not None for entry in inside)
    if last or limit.holds(sum(entry.nbytes for entry in inside)):
        units += _own_units(name, inside)
        for entry in inside:
            left.pop(id(entry.param), None)
        return
    own = [entry for param in module.parameters(recurse=False) for entry in left.pop(id(param), ())]
    units += _own_units(name, own)
    for child_name, child in module.named_children():
        _cut(child, f"{name}.{child_name}" if name else child_name, left, limit, units)


def _own_units(name: str, entries: list[Entry]) -> list[Unit]:
    """Parameters that stay together, and each part of one that was cut as a unit of its own."""
    whole = [entry for entry in entries if entry.part is None]
    parts = [Unit(entry.label, [entry]) for entry in entries if entry.part is not None]
    return ([Unit(name, whole)] if whole else []) + parts


def _join_small(parts: list[Unit], limit: Limit) -> list[Unit]:
    joined: list[Unit] = []
    taken = 0
    for part in parts:
        if joined and limit.holds(taken + part.nbytes):
            taken += part.nbytes
            joined[-1].entries += part.entries
            joined[-1].name = _common_name(joined[-1].name, part.name)
        else:
            taken = part.nbytes
            joined.append(Unit(part.name, list(part.entries)))
    return joined


def _common_name(first: str, second: str) -> str:
    if first == second:
        return first
    return f"{first.split('..')[0]}..{second}"


def note_calls(module: nn.Module, units: list[Unit]) -> None:
    """Says of each group with which others it is gathered at once: those that the calls around one of its modules read."""
    group_of = {id(entry.param): index for index, unit in enumerate(units) for entry in unit.entries if entry.part is None}
    parts_of: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        if unit.is_part:
            parts_of.setdefault(id(unit.entries[0].param), []).append(index)
    nbytes = [unit.nbytes for unit in units]
    most = [0] * len(units)
    seen: set[tuple[int, frozenset[int]]] = set()
    stack = [(module, frozenset[int]())]

    def note(index: int, at_once: frozenset[int]) -> None:
        total = sum(nbytes[other] for other in at_once)
        if total > most[index]:
            most[index], units[index].at_once = total, at_once

    while stack:
        inside, around = stack.pop()
        if (id(inside), around) in seen:
            continue
        seen.add((id(inside), around))
        read = list(_read_by(inside))
        own = {group_of[id(param)] for param in read if id(param) in group_of}
        around |= own
        for index in own:
            note(index, around)
        for param in read:
            for index in parts_of.get(id(param), ()):  # one at a time
                note(index, around | {index})
        stack += [(child, around) for child in inside.children()]


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that a module's own forward reads: all below it where it is compiled, or known to read those of a child."""
    whole = module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
    return module.parameters(recurse=whole or isinstance(module, nn.MultiheadAttention))
