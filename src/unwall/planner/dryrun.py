"""A dry run at any scale: the engine's own sharding code, one rank at a time, on tensors without memory.

[Note: without memory]
All tiers hand out tensors on the meta device and keep their accounts. The ranks are a fake process group, whose collectives do
nothing. Everything else is the real thing: grouping, layouts, homes, the check that it fits, groups, gradients, the engine
with its hooks, and AdamW with its states.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from unwall.optim.adamw import AdamW
from unwall.planner.choose import ChosenPlan
from unwall.planner.outline import Outline
from unwall.plans import Plan
from unwall.runtime.assemble import assemble
from unwall.shards import collectives
from unwall.shards.build import Room
from unwall.shards.home import Home, Sizes
from unwall.shards.layout import SLOT_BYTES, Layout
from unwall.shards.states import adamw_specs, bytes_per_element, master_specs
from unwall.shards.watch import Watch
from unwall.tiers.block import Block, MemoryBlock
from unwall.tiers.device import DeviceTier
from unwall.tiers.disk import DiskTier
from unwall.tiers.host import HostBlock, HostTier
from unwall.tiers.ledger import Ledger, TierName
from unwall.tiers.sizes import ALIGNMENT, align_up, format_bytes
from unwall.tiers.tiers import Tiers

MAX_RANKS = 1024
MANY_PARAMS = 4000


class DryRunError(RuntimeError):
    """The sharding code and the formulas disagree: says on which rank, by how much."""


@dataclass(frozen=True)
class DryRun:
    """What was found; it only comes into being where everything agreed."""

    ranks: int
    tried: tuple[int, ...]
    """Ranks whose sharding was run."""
    groups: int
    params: int
    bytes_held: dict[TierName, int]
    """Of one rank, by the tiers' own accounts: parameters, master, moments."""
    formula_bytes: float
    """The same by the formula, without padding: bytes per parameter, over the ranks."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self)) | {"tried": list(self.tried)}


def dry_run(outline: Outline, plan: ChosenPlan, tried: Sequence[int] | None = None) -> DryRun:
    """Shards the model on some ranks and checks groups, shards and bytes. DryRunError where they differ.

    ``tried``: the first, the middle and the last one, or, for a model of very many parameters, only the last.
    """
    ranks = plan.ranks
    if not 1 <= ranks <= MAX_RANKS:
        raise DryRunError(f"a dry run takes 1 to {MAX_RANKS} ranks, got {ranks}")
    if tried is None:
        few = sum(1 for _ in outline.module.parameters()) <= MANY_PARAMS
        tried = sorted({0, ranks // 2, ranks - 1}) if few else [ranks - 1]
    begin = time.perf_counter()
    engine_plan = plan.to_plan()
    for rank in tried:
        held, layouts = _shard_on_paper(_twin(outline.module), engine_plan, plan, rank)
    _check_cover(layouts, ranks)
    formula, allowed = (_formula(layouts, engine_plan, ranks, padded=padded) for padded in (False, True))
    total = sum(held.values())
    if not formula <= total <= allowed:
        raise DryRunError(
            f"one rank holds {format_bytes(total)}, but the formula gives {format_bytes(int(formula))}, with padding at most "
            f"{format_bytes(int(allowed))}"
        )
    numel = sum(param.numel() for param in outline.module.parameters())
    return DryRun(ranks, tuple(tried), len(layouts), numel, held, formula, time.perf_counter() - begin)


def _twin(module: nn.Module) -> nn.Module:
    """The same module with parameters on the meta device, which sharding may change."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    return copy.deepcopy(module, memo)


@contextmanager
def fake_ranks(rank: int, ranks: int) -> "Iterator[dist.ProcessGroup | None]":
    """A process group whose collectives do nothing. None for a rank that is alone."""
    if ranks == 1:
        yield None
        return
    if dist.is_initialized():
        raise DryRunError("a dry run needs torch.distributed for itself: run it in a process of its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    world = dist.group.WORLD
    assert world is not None
    # The announcements would go over a gloo group, which needs real ranks to meet. There is nobody to watch either.
    watch = Watch(HashStore(), rank, size=1)
    collectives._controls[world] = dist.new_group(list(range(ranks)), backend="fake"), watch
    try:
        yield world
    finally:
        collectives._controls.pop(world, None)
        watch.let_go()
        dist.destroy_process_group()


class _HostOnPaper(HostTier):
    """See [Note: without memory]."""

    def allocate(self, nbytes: int, label: str = "", pinned: bool = False, touch: bool = True) -> HostBlock:  # noqa: ARG002
        block = HostBlock(self.ledger, nbytes, label, torch.empty(nbytes, dtype=torch.uint8, device="meta"), pinned)
        self.ledger.charge(block, nbytes, label)
        return block


class _DiskOnPaper:
    """See [Note: without memory]. Its blocks can be looked at without reading."""

    name: TierName = "disk"

    def __init__(self) -> None:
        self.ledger = Ledger("disk")

    def zeros(self, nbytes: int, label: str = "") -> MemoryBlock:
        block = MemoryBlock(self.ledger, nbytes, label, torch.empty(nbytes, dtype=torch.uint8, device="meta"))
        self.ledger.charge(block, align_up(nbytes), label)
        return block

    def free(self, block: Block) -> None:
        block.mark_freed(self.ledger)
        self.ledger.discharge(block)


def _shard_on_paper(module: nn.Module, plan: Plan, chosen: ChosenPlan, rank: int) -> tuple[dict[TierName, int], list[Layout]]:
    """What ``unwall.shard`` and ``unwall.AdamW`` do. The bytes that each tier's account shows, and the groups' layouts."""
    expected: dict[TierName, int] = {}

    def make_tiers(sizes: list[Sizes], homes: list[Home]) -> Tiers:
        expected.update(_expected(sizes, homes))
        disk = cast(DiskTier, _DiskOnPaper()) if any(home.on_disk for home in homes) else None
        device = DeviceTier(torch.device("meta"), plan.budget_device_bytes)
        return Tiers(device, _HostOnPaper(None, plan.budget_host_bytes), disk)

    counted_on = Room(chosen.budget_device_bytes, chosen.budget_host_bytes)
    with fake_ranks(rank, chosen.ranks) as group:
        engine = assemble(module, plan, collectives.Ranks(group), counted_on, make_tiers, lambda _: None)
        optimizer = AdamW(module.parameters(), update_in_backward=plan.transient)  # its states go with it
        held: dict[TierName, int] = {name: ledger.live_bytes for name, ledger in engine.tiers.ledgers.items()}
        del optimizer
    _check(rank, held, expected)
    return held, [each.layout for each in engine.groups]


def _expected(sizes: Sequence[Sizes], homes: Sequence[Home]) -> dict[TierName, int]:
    """Parameters, master and moments by tier, as ``shards/home.py`` counts them."""
    found: dict[TierName, int] = {"device": 0, "host": 0, "disk": 0}
    for size, home in zip(sizes, homes, strict=True):
        found[home.params] += size.shard_bytes if home.tier == "host" or not size.whole else size.flat_bytes
        found[home.states] += size.state_bytes - size.master_bytes
        found[home.master] += size.master_bytes
        if home.resident:
            found["device"] += size.flat_bytes
    return found


def _check(rank: int, held: dict[TierName, int], expected: dict[TierName, int]) -> None:
    for tier, nbytes in expected.items():
        if held.get(tier, 0) != nbytes:
            raise DryRunError(f"rank {rank} holds {held.get(tier, 0)} bytes on the {tier}, shards/home.py counts {nbytes}")


def _formula(layouts: Sequence[Layout], plan: Plan, ranks: int, padded: bool = False) -> float:
    """Bytes per parameter, cut as the stage says. ``padded``: with the most that padding can add."""
    total = 0.0
    for layout in layouts:
        item = layout.dtype.itemsize
        states = bytes_per_element((*master_specs(layout.dtype, plan.lean), *adamw_specs(layout.dtype, plan.lean)))
        numel = layout.numel + (len(layout.slots) * SLOT_BYTES // item + ALIGNMENT // 2 * ranks if padded else 0)
        total += numel * item / (ranks if plan.stage == 3 else 1)
        total += numel * states / (ranks if plan.stage > 0 else 1)
        if plan.params == "device" and plan.optimizer == "host":  # the host keeps what the device shows
            total += numel * item / (ranks if plan.stage > 0 else 1)
    return total


def _check_cover(layouts: Sequence[Layout], ranks: int) -> None:
    """Every element belongs to exactly one rank; looked at in the first, the last and the largest group."""
    largest = max(layouts, key=lambda layout: layout.padded_numel)
    for layout in (layouts[0], layouts[-1], largest):
        owned = sum(segment.numel for rank in range(ranks) for segment in layout.segments(rank))
        if owned != layout.numel:
            raise DryRunError(f"the ranks own {owned} elements of a group that has {layout.numel}")
