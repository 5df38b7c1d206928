"""Groups and layouts of every small module tree: nothing lost, nothing mixed, nothing cut that fits, nothing apart that would fit."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from unwall.shards.grouping import (
    BUDGET_SHARE,
    GROUP_BYTES_MAX,
    GROUP_BYTES_MIN,
    GROUPS_WANTED,
    Entry,
    Limit,
    Unit,
    build_groups,
    entries_of,
    group_bytes,
)
from unwall.shards.layout import SLOT_BYTES, build_layout
from unwall.tiers.sizes import ALIGNMENT

TRAINED, FROZEN = True, False


@dataclass(frozen=True)
class Tree:
    """A module: its own parameters (bytes, kind) and its children."""

    own: tuple[tuple[int, bool], ...]
    children: tuple["Tree", ...] = ()


LEAVES = [Tree(own) for own in (((1, TRAINED),), ((3, TRAINED),), ((1, FROZEN),), ((2, FROZEN), (1, TRAINED)))]
BLOCKS = [
    Tree(own, children)
    for own in ((), ((2, TRAINED),))
    for children in (*itertools.product(LEAVES), *itertools.product(LEAVES, LEAVES))
]


def trees() -> Iterator[Tree]:
    """Depth one to three, up to two children each."""
    yield from LEAVES
    parts = [*LEAVES, *BLOCKS]
    for own in ((), ((1, FROZEN), (1, TRAINED))):
        for children in (*itertools.product(parts), *itertools.product(parts, parts)):
            yield Tree(own, children)


def build(tree: Tree) -> nn.Module:
    module = nn.Module()
    for index, (size, trained) in enumerate(tree.own):
        module.register_parameter(f"p{index}", nn.Parameter(torch.empty(size, dtype=torch.int8), requires_grad=False))
        module.get_parameter(f"p{index}").kind = trained
    for index, child in enumerate(tree.children):
        module.add_module(str(index), build(child))
    return module


def described(module: nn.Module) -> list[Entry]:
    return entries_of(module, lambda _, param: (param.kind, torch.int8))


def first_owners(module: nn.Module) -> dict[int, str]:
    """The module under which each parameter is registered first."""
    found: dict[int, str] = {}
    for name, part in module.named_modules():
        for param in part.parameters(recurse=False):
            found.setdefault(id(param), name)
    return found


def is_within(name: str, ancestor: str) -> bool:
    return ancestor in ("", name) or name.startswith(f"{ancestor}.")


def wanted_parts(module: nn.Module, entries: Sequence[Entry], limit: int) -> dict[bool, list[list[Entry]]]:
    """What must stay together, in order, for each kind: the largest subtree that fits, or one module's own parameters."""
    owners = first_owners(module)
    fitting = [
        name
        for name, _ in module.named_modules()
        if sum(entry.nbytes for entry in entries if is_within(owners[id(entry.param)], name)) <= limit
    ]
    parts: dict[bool, dict[str, list[Entry]]] = {}
    for entry in entries:
        owner = owners[id(entry.param)]
        unit = min((name for name in fitting if is_within(owner, name)), key=len, default=f"own {owner}")
        parts.setdefault(entry.kind, {}).setdefault(unit, []).append(entry)
    return {kind: list(units.values()) for kind, units in parts.items()}


def fewest_groups(sizes: Sequence[int], limit: int) -> int:
    """Over every way to join neighbours without exceeding the limit."""
    best = len(sizes)
    for borders in itertools.product((False, True), repeat=len(sizes) - 1):
        runs = [[sizes[0]]]
        for border, size in zip(borders, sizes[1:], strict=True):
            runs.append([size]) if border else runs[-1].append(size)
        if all(len(run) == 1 or sum(run) <= limit for run in runs):
            best = min(best, len(runs))
    return best


def check_groups(module: nn.Module, entries: list[Entry], groups: list[Unit], limit: int) -> None:
    position = {id(entry.param): at for at, entry in enumerate(entries)}
    placed = [[position[id(entry.param)] for entry in group.entries] for group in groups]
    assert sorted(itertools.chain(*placed)) == list(range(len(entries))), "every parameter in exactly one group"
    assert all(len({entry.kind for entry in group.entries}) == 1 for group in groups), "one kind in each group"
    assert all(run == sorted(run) for run in placed)
    firsts = [run[0] for run in placed]
    assert firsts == sorted(firsts), "in the order of registration"
    group_of = {at: number for number, run in enumerate(placed) for at in run}
    for kind, parts in wanted_parts(module, entries, limit).items():
        for part in parts:
            assert len({group_of[position[id(entry.param)]] for entry in part}) == 1, "kept whole"
        own = [group for group in groups if group.entries[0].kind == kind]
        assert len(own) == fewest_groups([sum(entry.nbytes for entry in part) for part in parts], limit)
        for first, second in itertools.pairwise(own):
            assert first.nbytes + second.nbytes > limit, "two neighbours would have fitted into one group"
    owners = first_owners(module)
    for group in groups:
        if group.nbytes > limit:
            assert len({owners[id(entry.param)] for entry in group.entries}) == 1, "larger than allowed"


def check(module: nn.Module, limits: Sequence[int]) -> None:
    entries = described(module)
    for limit in limits:
        check_groups(module, entries, build_groups(module, entries, limit), limit)


def test_every_small_tree_is_cut_as_little_as_the_limit_allows():
    for tree in trees():
        check(build(tree), (1, 3, 6))


def test_a_model_that_fits_is_one_group_for_each_kind():
    for tree in itertools.islice(trees(), 0, None, 5):
        module = build(tree)
        entries = described(module)
        groups = build_groups(module, entries, sum(entry.nbytes for entry in entries))
        kinds = list(dict.fromkeys(entry.kind for entry in entries))
        assert [group.entries for group in groups] == [[e for e in entries if e.kind == kind] for kind in kinds]


def test_groups_are_the_same_down_to_the_largest_sum_that_passed():
    """By that a search for a plan knows which limits it need not look at."""
    for tree in itertools.islice(trees(), 0, None, 7):
        module = build(tree)
        entries = described(module)
        named = {
            limit: [[entry.name for entry in group.entries] for group in build_groups(module, entries, limit)]
            for limit in range(sum(entry.nbytes for entry in entries) + 2)
        }
        for most in named:
            limit = Limit(most)
            build_groups(module, entries, limit)
            assert all(named[low] == named[most] for low in range(limit.passed_bytes, most + 1))


def test_every_rank_gets_the_same_groups_and_none_is_named_twice():
    for tree, limit in itertools.product(itertools.islice(trees(), 0, None, 5), (1, 3, 6)):
        here, there = (build(tree) for _ in range(2))
        named = [
            [(group.name, group.entries[0].kind, [entry.name for entry in group.entries]) for group in found]
            for found in (build_groups(module, described(module), limit) for module in (here, there))
        ]
        assert named[0] == named[1]
        assert len({(name, kind) for name, kind, _ in named[0]}) == len(named[0])


def test_a_tied_parameter_is_in_the_group_of_its_first_name_only():
    """Every pair of places with parameters of one size and kind in different modules, tied."""
    for tree in itertools.islice(trees(), 0, None, 17):
        plain = build(tree)
        places = [(owner, name) for owner, part in plain.named_modules() for name, _ in part.named_parameters(recurse=False)]
        for (first, one), (second, other) in itertools.combinations(places, 2):
            module = build(tree)
            kept, replaced = (module.get_submodule(first).get_parameter(one), module.get_submodule(second).get_parameter(other))
            if first == second or (kept.numel(), kept.kind) != (replaced.numel(), replaced.kind):
                continue
            module.get_submodule(second).register_parameter(other, kept)
            entries = described(module)
            assert len(entries) == len(places) - 1
            assert [entry.name for entry in entries if entry.param is kept] == [f"{first}.{one}".lstrip(".")]
            check(module, (2, 4))


def test_a_module_used_twice_is_grouped_once():
    for leaf, block in itertools.product(LEAVES, BLOCKS):
        module = build(Tree((), (leaf, block, leaf)))
        module.add_module("again", module.get_submodule("1"))
        module.get_submodule("1").add_module("inner", module.get_submodule("2"))
        check(module, (1, 2, 4, 100))


def test_the_limit_of_a_group_follows_the_model_and_the_budget():
    totals = [0, 1, GROUPS_WANTED * GROUP_BYTES_MIN, GROUPS_WANTED * GROUP_BYTES_MIN + GROUPS_WANTED, 1 << 30, 1 << 50]
    budgets = [0, 1, BUDGET_SHARE, 1 << 16, 1 << 20, 1 << 40, None]
    for total, budget in itertools.product(totals, budgets):
        limit = group_bytes(total, budget)
        assert 1 <= limit <= GROUP_BYTES_MAX
        assert limit * GROUPS_WANTED <= max(total, GROUPS_WANTED * GROUP_BYTES_MIN)
        assert budget is None or limit * BUDGET_SHARE <= max(budget, BUDGET_SHARE)
        assert budget is not None or limit == GROUP_BYTES_MAX or limit >= max(GROUP_BYTES_MIN, total // GROUPS_WANTED)
    for budget in budgets:
        limits = [group_bytes(total, budget) for total in totals]
        assert limits == sorted(limits)
    for total in totals:
        limits = [group_bytes(total, budget) for budget in budgets]
        assert limits == sorted(limits)


NUMELS = (0, 1, 63, 64, 2048, 5000)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_slots_lie_close_aligned_and_apart(dtype, world):
    step, unit = SLOT_BYTES // dtype.itemsize, ALIGNMENT // 2 * world
    for numels in itertools.chain.from_iterable(itertools.product(NUMELS, repeat=count) for count in range(4)):
        names = [f"p{index}" for index in range(len(numels))]
        layout = build_layout(names, [torch.Size([numel]) for numel in numels], dtype, world)
        assert [(slot.name, slot.numel) for slot in layout.slots] == list(zip(names, numels, strict=True))
        end = 0
        for slot in layout.slots:
            assert slot.offset * dtype.itemsize % SLOT_BYTES == 0
            assert end <= slot.offset < end + step, "padding that alignment does not ask for"
            end = slot.end
        assert layout.padded_numel == max(1, -(-end // unit)) * unit  # the smallest that gives each rank an aligned shard
        assert layout.shard_numel * world == layout.padded_numel
        assert layout.numel == sum(numels)
        assert layout.flat_bytes == layout.padded_numel * dtype.itemsize


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_the_ranks_segments_cover_every_element_once_and_in_order(world):
    for numels in itertools.chain.from_iterable(itertools.product(NUMELS, repeat=count) for count in range(5)):
        layout = build_layout([str(at) for at in range(len(numels))], [torch.Size([n]) for n in numels], torch.bfloat16, world)
        covered = [0] * len(numels)
        reached = 0
        for rank in range(world):
            inside = 0
            for segment in layout.segments(rank):
                assert segment.numel > 0
                assert segment.start == covered[segment.slot], "each part follows the one before"
                covered[segment.slot] += segment.numel
                at = layout.slots[segment.slot].offset + segment.start
                assert at == rank * layout.shard_numel + segment.shard_start
                assert at >= reached
                assert inside <= segment.shard_start <= layout.shard_numel - segment.numel
                reached, inside = at + segment.numel, segment.shard_start + segment.numel
        assert covered == list(numels)
