"""A model as the schedule sees it: its operators in order, which groups each reads, and what each computes.

[Note: order]
The order of use is taken from the order of registration: forward runs through the operators, backward through the blocks from
the last to the first. A model that registers its modules in another order than it calls them is predicted a little wrong, and
trained right all the same: the engine watches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from unwall.planner.description import Description, Part, chosen_share, from_module, units
from unwall.plans import Plan
from unwall.shards.grouping import Unit
from unwall.shards.groupings import Groupings
from unwall.shards.tiles import tileable


@dataclass(frozen=True)
class Operator:
    """A module that reads parameters of its own (or, tied, another one's)."""

    params: tuple[nn.Parameter, ...]
    active_numel: float
    """Elements of matrices that each token passes."""
    pair_flops: float
    """FLOPs forward for each pair of tokens of a sample."""
    block: int | None
    """Which block it is in, counted over the model. None: beside the blocks."""


@dataclass(frozen=True)
class Stretch:
    """Operators that follow each other and read the same groups."""

    groups: tuple[int, ...]
    numel: int
    """Parameters that are read."""
    active_numel: float
    pair_flops: float
    block: int | None

    def flops(self, batch: float, seq: float) -> float:
        """Forward, for ``batch`` samples of ``seq`` tokens."""
        return batch * seq * (2 * self.active_numel + self.pair_flops * seq)


@dataclass(frozen=True)
class Outline:
    """A model without values: a module on the meta device (or any other), its description and its operators."""

    module: nn.Module
    description: Description
    operators: tuple[Operator, ...]
    ignore: Callable[[str, nn.Parameter], bool] | None = None
    """As in ``Plan``: parameters that are left alone."""

    @property
    def ignored_bytes(self) -> int:
        """What the parameters that are left alone take on the device, whole: their values and, trained, their gradients."""
        named = self.module.named_parameters() if self.ignore is not None else ()
        left = [param for name, param in named if self.ignore is not None and self.ignore(name, param)]
        return sum(param.numel() * param.element_size() * (1 + param.requires_grad) for param in left)

    @cached_property
    def largest_tileable_numel(self) -> int:
        """Elements of the largest parameter that can be read in tiles."""
        return max((param.numel() for param in tileable(self.module).values()), default=0)

    @cached_property
    def _groupings(self) -> dict[tuple[torch.dtype, int], Groupings]:
        return {}

    def groupings(self, plan: Plan, ranks: int) -> Groupings:
        """The groups of the model under any budget, for the dtypes of a plan."""
        if plan.keep_fp32 is not None or plan.ignore is not self.ignore:
            return Groupings(self.module, plan, ranks)
        key = plan.compute_dtype, ranks
        if key not in self._groupings:
            self._groupings[key] = Groupings(self.module, plan, ranks)
        return self._groupings[key]

    def stretches(self, groups: Sequence[Unit]) -> list[Stretch]:
        """The model's forward as runs of operators over these groups. See [Note: order]."""
        found: list[Stretch] = []
        for step in self._steps(groups):
            read, numel = step.groups, step.numel
            if not read:  # all of it is left alone
                read = found[-1].groups if found else (0,)
                step = replace(step, groups=read)
            if found and (found[-1].groups, found[-1].block) == (read, step.block):
                step = Stretch(
                    read,
                    found[-1].numel + numel,
                    found[-1].active_numel + step.active_numel,
                    found[-1].pair_flops + step.pair_flops,
                    step.block,
                )
                found.pop()
            found.append(step)
        return found

    def _steps(self, groups: Sequence[Unit]) -> Iterator[Stretch]:
        """One for each operator or, where it reads a parameter in tiles, for each of those."""
        places: dict[int, list[int]] = {}
        for index, unit in enumerate(groups):
            for entry in unit.entries:
                places.setdefault(id(entry.param), []).append(index)
        for operator in self.operators:
            params = [param for param in operator.params if id(param) in places]  # the others are left alone
            whole = {places[id(param)][0] for param in params if len(places[id(param)]) == 1}
            tiles = [index for param in params if len(places[id(param)]) > 1 for index in places[id(param)]]
            numel = sum(param.numel() for param in params)
            if not tiles:
                yield Stretch(tuple(sorted(whole)), numel, operator.active_numel, operator.pair_flops, operator.block)
            for index in tiles:
                read, share = tuple(sorted({*whole, index})), 1 / len(tiles)
                active, pairs = operator.active_numel * share, operator.pair_flops * share
                yield Stretch(read, round(numel * share), active, pairs, operator.block)


def outline_of(module: nn.Module, name: str | None = None) -> Outline:
    """A real module; only shapes are read. See ``description.from_module`` for what shapes do not show."""
    return Outline(module, from_module(module, name), tuple(_operators(module)))


def _operators(module: nn.Module) -> Iterator[Operator]:
    share, block = chosen_share(module), -1
    for _, inside, is_block in units(module):
        begins = is_block
        for path, owner in inside:
            params = tuple(owner.parameters(recurse=False))
            if params:
                block, begins = block + begins, False
                used = share if "experts" in path.split(".") else 1.0
                active = 0.0
                if not isinstance(owner, nn.Embedding | nn.EmbeddingBag):
                    active = used * sum(param.numel() for param in params if param.dim() > 1)
                yield Operator(params, active, 0.0, block if is_block else None)


class _Weight(nn.Module):
    """A parameter and nothing else."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, device="meta"))


class _Matrix(nn.Linear):
    """A linear layer to whoever asks whether it can be read in tiles. Nothing is initialised."""

    def __init__(self, numel: int, width: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(numel // width, width, device="meta"))
        self.register_parameter("bias", None)


class _Table(nn.Embedding):
    """The same for a table that is looked up in."""

    def __init__(self, numel: int, width: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.empty(numel // width, width, device="meta"))
        self.max_norm = None


def skeleton(description: Description) -> Outline:
    """A module on the meta device with the parameters of a description, and nothing that could run."""
    module, operators = nn.Module(), []
    width = max((part.boundary_numel for part in description.parts), default=0)
    parts = [part for part in description.parts if not part.is_block and not part.active_numel]  # looked up before the blocks
    parts += [part for part in description.parts if part.is_block]
    parts += [part for part in description.parts if not part.is_block and part.active_numel]
    blocks = 0
    for number, part in enumerate(parts):
        repeats = nn.ModuleList() if part.is_block else None
        for _ in range(part.count):
            holder, found = _hold(part, width, blocks if part.is_block else None)
            blocks += part.is_block
            if not part.is_block and part.active_numel > sum(piece.active_numel for piece in part.pieces):
                found.append(_tied(module, part))
            operators += found
            if repeats is not None:
                repeats.append(holder)
            else:
                module.add_module(f"{number}_{part.name}", holder)
        if repeats is not None:
            module.add_module(part.name.replace(".", "_"), repeats)
    return Outline(module, description, tuple(operators))


def _hold(part: Part, width: int, block: int | None) -> tuple[nn.Module, list[Operator]]:
    """The parameters of one part, each in a module of its own."""
    holder, operators = nn.Module(), []
    for number, piece in enumerate(part.pieces):
        looked_up = block is None and not part.active_numel
        if width and not piece.numel % width and (piece.active_numel or looked_up):
            weight: nn.Module = (_Table if looked_up else _Matrix)(piece.numel, width)
        else:
            weight = _Weight(piece.numel)
        holder.add_module(str(number), weight)
        pairs = float(part.pair_flops) if number == 0 else 0.0
        operators.append(Operator(tuple(weight.parameters()), piece.active_numel, pairs, block))
    return holder, operators


def _tied(module: nn.Module, part: Part) -> Operator:
    """A head without a matrix of its own reads the first table that was looked up."""
    table = next(iter(module.parameters()))
    return Operator((table,), part.active_numel, 0.0, None)


def passes_of(stretches: Iterable[Stretch], repeats: Callable[[int | None], bool]) -> list[tuple[int, str]]:
    """The uses of one forward and backward: (stretch, what is done there).

    ``forward``, ``backward``, and, right before the backward of a block that ``repeats`` its forward: ``begin`` (its last
    stretch is looked at) and ``again`` (its forward).
    """
    listed = list(stretches)
    order = [(index, "forward") for index in range(len(listed))]
    end = len(listed)
    while end:
        start = end - 1
        block = listed[start].block
        while block is not None and start and listed[start - 1].block == block:
            start -= 1
        if repeats(block):
            order += [(end - 1, "begin"), *((index, "again") for index in range(start, end))]
        order += [(index, "backward") for index in reversed(range(start, end))]
        end = start
    return order
