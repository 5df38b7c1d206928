"""From a module to groups: what each parameter computes in, what fits, and moving the values into shards."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from unwall.plans import Plan, PlanError
from unwall.shards.collectives import Ranks
from unwall.shards.compress import packed_bytes, travels_packed
from unwall.shards.gradient import Gradient
from unwall.shards.group import Group
from unwall.shards.grouping import Entry, Unit
from unwall.shards.groupings import Kind
from unwall.shards.groupings import compute_dtype as compute_dtype
from unwall.shards.groupings import fp32_names as fp32_names
from unwall.shards.groupings import ignored as ignored
from unwall.shards.groupings import plan_groups as plan_groups
from unwall.shards.home import Home, Sizes, device_bytes_of, disk_bytes_of, host_bytes_of
from unwall.shards.layout import Layout
from unwall.shards.local import made_real, show
from unwall.shards.master import clear_master, make_master, read_master, rounded, write_master
from unwall.shards.states import adamw_specs, bytes_per_element, master_specs
from unwall.shards.store import Staging
from unwall.shards.working import TRANSIENT_GRADIENTS, chunks_bytes, host_working_bytes, working_bytes
from unwall.tiers.loans import Loans
from unwall.tiers.sizes import format_bytes
from unwall.tiers.tiers import Tiers


def sizes_of(planned: list[tuple[Unit, Layout]], plan: Plan, world_size: int, replicas: int = 1) -> list[Sizes]:
    """What each group takes on one rank of ``world_size``, with so many replicas of all of them."""
    if plan.transient and world_size * replicas > 1:
        raise PlanError(
            f"grads='transient' is for one rank, and there are {world_size * replicas}: until backward ends another rank may "
            "add to a gradient. Write grads='auto'"
        )
    known: dict[tuple[int, Hashable, bool, int, bool], Sizes] = {}  # blocks are alike, and there may be hundreds
    found = []
    for unit, layout in planned:
        kind = unit.entries[0].kind
        at_once = sum(planned[index][1].flat_bytes for index in unit.at_once)
        key = layout.padded_numel, kind, unit.several, at_once, is_transient(layout, plan)
        if key not in known:
            assert isinstance(kind, Kind)
            master = states = 0
            if kind.trainable or kind.exact or layout.dtype is torch.float16:
                master = bytes_per_element(master_specs(layout.dtype, plan.lean and kind.trainable))
            if kind.trainable:
                states = bytes_per_element(adamw_specs(layout.dtype, plan.lean))
            size = group_sizes(layout, master + states, kind.trainable, plan, world_size, unit.several, master, replicas)
            known[key] = replace(size, at_once_bytes=at_once)
        found.append(known[key])
    return found


def group_sizes(
    layout: Layout,
    state_bytes: int,
    trainable: bool,
    plan: Plan,
    world_size: int,
    several: bool = False,
    master_bytes: int = 0,
    replicas: int = 1,
) -> Sizes:
    """What a group takes on one rank. ``state_bytes``: of each element, master and optimizer state, of which ``master_bytes``
    are the master's. ``several``: its gradient may land in several parts even in one pass. ``replicas``: of all ranks."""
    owned = layout.padded_numel if plan.stage == 0 else layout.shard_numel
    grad_item = (plan.sum_dtype or layout.dtype).itemsize
    reduced = layout.shard_numel + (layout.padded_numel if plan.stage == 0 else 0)  # stage 0: then gathered again
    packs = world_size > 1 and travels_packed(layout.dtype)
    feeds = trainable and plan.reduce_feedback and travels_packed(layout.dtype)
    exchanged = packed_bytes(layout.padded_numel, plan.reduce_bits) if packs and trainable and plan.reduce_bits else 0
    kept = layout.padded_numel if plan.stage < 2 else layout.shard_numel
    nodes = plan.node_ranks is not None and 1 < plan.node_ranks < world_size
    per_node = plan.node_ranks if nodes and plan.node_ranks is not None else 1
    two_hops = exchanged > 0 and nodes and not plan.reduce_feedback
    exchanged = exchanged // per_node if two_hops else exchanged
    passes = trainable and is_transient(layout, plan)
    own_grad = kept * grad_item if trainable else 0
    in_node = layout.padded_numel // per_node * grad_item if two_hops else 0  # what its ranks' gradients are summed to first
    return Sizes(
        shard_bytes=owned * layout.dtype.itemsize,
        flat_bytes=layout.flat_bytes,
        state_bytes=owned * state_bytes,
        grad_bytes=0 if passes else own_grad,
        grad_flat_bytes=layout.padded_numel * grad_item if trainable else 0,
        grad_part_bytes=reduced * grad_item + 2 * exchanged + in_node if trainable and world_size > 1 else 0,
        widening_bytes=owned * max(0, 4 - grad_item) if trainable and not passes else 0,
        whole=plan.stage < 3 or world_size == 1,
        trainable=trainable,
        own_numel=owned,
        sum_bytes=owned * max(4, grad_item) if trainable and (plan.passes > 1 or several) and not passes else 0,
        transit_bytes=packed_bytes(layout.padded_numel, plan.gather_bits) if packs and plan.gather_bits else 0,
        exchange_bytes=exchanged,
        residual_bytes=layout.padded_numel * grad_item if feeds and world_size > 1 else 0,
        averaged_residual_bytes=owned * grad_item if feeds and replicas > 1 else 0,
        replica_bytes=layout.flat_bytes // per_node if nodes and plan.replica and plan.stage > 0 else 0,
        master_bytes=owned * master_bytes,
        transient_bytes=own_grad if passes else 0,
        adds_up=plan.passes > 1 or several or world_size > 1,  # over ranks, one in another order may add up in one pass
    )


@dataclass(frozen=True)
class Room:
    """What this rank may use of each tier, in bytes. None: no limit is known."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None


def smallest(rooms: Sequence[Room]) -> Room:
    """What every rank has: all must place the groups alike."""

    def least(values: list[int | None]) -> int | None:
        return min((value for value in values if value is not None), default=None)

    return Room(
        least([room.device_bytes for room in rooms]),
        least([room.host_bytes for room in rooms]),
        least([room.disk_bytes for room in rooms]),
    )


def check_fit(
    sizes: Sequence[Sizes],
    homes: Sequence[Home],
    plan: Plan,
    world_size: int,
    room: Room,
    optimizer: str = "",
    chunks_there_bytes: int = 0,
) -> None:
    """PlanError where a tier does not hold what the groups take. ``optimizer``: whose states are counted, if not AdamW's.
    ``chunks_there_bytes``: of host memory for chunks that is taken already, perhaps for another one's."""
    pairs = list(zip(sizes, homes, strict=True))
    on_host = host_working_bytes(sizes, homes)
    if any(home.on_disk for home in homes):
        on_host += max(0, chunks_there_bytes - chunks_bytes(sizes, homes))
    needs = {
        "device": (sum(device_bytes_of(*pair) for pair in pairs), working_bytes(sizes, homes), plan.budget_device_bytes),
        "host": (sum(host_bytes_of(*pair) for pair in pairs), on_host, room.host_bytes),
        "disk": (sum(disk_bytes_of(*pair) for pair in pairs), 0, room.disk_bytes),
    }
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    for tier, (held, working, budget) in needs.items():
        if budget is None or held + working <= budget:
            continue
        advice = {"device": "", "host": ", or a larger device_bytes", "disk": ", or more host_bytes"}[tier]
        if tier == "host" and not plan.directories:
            advice += ", or a directory for what is left over: disk='/path/on/a/fast/drive'"
        if optimizer and "auto" in (plan.params, plan.optimizer) and plan.directories:
            advice += ", or optimizer='disk' (left to unwall, homes are chosen for the states of AdamW)"
        error = PlanError(
            f"the plan does not fit{optimizer and f' {optimizer}'}: states on the {tier} take {format_bytes(held)} per rank, "
            f"and {format_bytes(working)} more while working, but {tier}_bytes is {format_bytes(budget)} ({budget} bytes). "
            f"The nearest plan that fits on {ranks}: Plan(stage={plan.stage}, {tier}_bytes={held + working}){advice}"
        )
        error.lack = list(needs).index(tier), held + working
        raise error


def make_groups(
    planned: list[tuple[Unit, Layout]],
    homes: list[Home],
    plan: Plan,
    tiers: Tiers,
    ranks: Ranks,
    whole_value: Callable[[Entry], torch.Tensor | None],
    after: Sequence[Group] = (),
) -> tuple[list[Group], list[Gradient]]:
    """Allocates the groups and moves every parameter's value into its shard, one parameter at a time.

    ``whole_value`` gives a parameter's value, or None where there is none yet (meta device): NaN until it is loaded.
    ``after``: the groups that the model has already, where these are added to them.
    """
    groups: list[Group] = []
    gradients: list[Gradient] = []
    taken: list[tuple[Group, int]] = []
    try:
        _make_all(planned, homes, plan, tiers, ranks, whole_value, after, groups, gradients, taken)
    except BaseException as error:
        _put_back(taken, error)
        raise
    if not after:
        ranks.begin_announcing(-(-max(len(group.params) for group in groups) // 62))
    return groups, gradients


def _make_all(
    planned: list[tuple[Unit, Layout]],
    homes: list[Home],
    plan: Plan,
    tiers: Tiers,
    ranks: Ranks,
    whole_value: Callable[[Entry], torch.Tensor | None],
    after: Sequence[Group],
    groups: list[Group],
    gradients: list[Gradient],
    taken: list[tuple[Group, int]],
) -> None:
    staging = after[0].pending.staging if after else Staging()
    loans = _loans(planned, homes, plan, tiers)
    values = _Values(planned, ranks, tiers.device.device, whole_value)
    for index, ((unit, layout), home) in enumerate(zip(planned, homes, strict=True), len(after)):
        group = Group(
            index,
            unit.name or unit.entries[0].name,
            layout,
            [entry.param for entry in unit.entries],
            [entry.param.dtype for entry in unit.entries],
            tiers,
            ranks,
            home,
            staging,
            cut=plan.stage == 3 and ranks.size > 1,
            own_all=plan.stage == 0 or ranks.size == 1,
            gather_bits=plan.gather_bits,
            replicated=plan.replica is not None,
        )
        _fill(group, unit, values, taken, plan.lean)
        staging.close()
        if group.flat_is_home:
            group.attach()
        groups.append(group)
        dtype = layout.dtype if not layout.dtype.is_floating_point else plan.sum_dtype or layout.dtype
        if layout.dtype is torch.float64:
            dtype = layout.dtype
        options = {"keep_flat": plan.stage < 2, "everywhere": plan.stage == 0, "mean": plan.reduce_op == "mean"}
        bits, feedback = plan.reduce_bits, plan.reduce_feedback
        through = loans if is_transient(layout, plan) else None
        gradients.append(Gradient(group, tiers, ranks, dtype, bits=bits, feedback=feedback, loans=through, **options))


def is_transient(layout: Layout, plan: Plan) -> bool:
    """Whether the gradient of a group is used during backward and not kept. That of a part of a parameter is: it is used with
    the other parts, at the step."""
    return plan.transient and all(slot.whole for slot in layout.slots)


def _loans(planned: list[tuple[Unit, Layout]], homes: list[Home], plan: Plan, tiers: Tiers) -> Loans:
    """Host memory for gradients that are not kept."""
    sizes, largest = sizes_of(planned, plan, world_size=1) if plan.transient else [], 0
    for size, home in zip(sizes, homes, strict=bool(sizes)):
        largest = max(largest, size.transient_bytes if home.tier == "host" else 0)
    return Loans(tiers.host, largest, TRANSIENT_GRADIENTS)


def _put_back(taken: list[tuple[Group, int]], error: BaseException) -> None:
    """Something failed half way: the parameters that were taken already get their values back, where this rank has them."""
    whole: dict[int, torch.Tensor] = {}
    for group, slot in taken:
        place, param = group.layout.slots[slot], group.params[slot]
        if group.own_numel != group.layout.padded_numel:
            error.add_note("the parameters are cut over the ranks already: build the model again before another shard")
            return
        if id(param) not in whole:
            whole[id(param)] = torch.empty(place.shape, dtype=group.dtypes[slot], device=group.flat.device)
        place.range_of(whole[id(param)].view(-1)).copy_(read_master(group, None, place.offset, place.end))
        show(param, whole[id(param)])


class _Values:
    """Each parameter's value, taken once, however many slots it lies in, and the same on every rank."""

    def __init__(
        self,
        planned: list[tuple[Unit, Layout]],
        ranks: Ranks,
        device: torch.device,
        whole_value: Callable[[Entry], torch.Tensor | None],
    ) -> None:
        self._left = Counter(id(entry.param) for unit, _ in planned for entry in unit.entries)
        self._held: dict[int, torch.Tensor | None] = {}
        self._ranks, self._device, self._whole_value = ranks, device, whole_value

    def take(self, entry: Entry) -> torch.Tensor | None:
        """The whole value, flattened. None where there is none yet."""
        key = id(entry.param)
        if key not in self._held:
            value = self._whole_value(entry)
            if value is not None and self._ranks.size > 1:
                value = value.to(self._device).contiguous()
                self._ranks.broadcast(value)
            self._held[key] = value
        self._left[key] -= 1
        value = self._held[key] if self._left[key] else self._held.pop(key)
        return None if value is None else value.reshape(-1)


def _fill(group: Group, unit: Unit, values: _Values, taken: list[tuple[Group, int]], lean: bool) -> None:
    kind = unit.entries[0].kind
    assert isinstance(kind, Kind)
    group.lean = lean and kind.trainable and group.layout.dtype is torch.bfloat16
    if kind.exact or kind.trainable or group.layout.dtype is torch.float16:
        make_master(group)
    if group.flat_is_home:
        group.flat.zero_()  # the padding, too: it takes part in norms
    owned = {segment.slot: segment for segment in group.owned_segments()}
    with torch.no_grad():
        for slot, entry in enumerate(unit.entries):
            value, place = values.take(entry), group.layout.slots[slot]
            if group.flat_is_home and value is not None:
                part = rounded(place.range_of(value), group.layout.dtype)
                group.view_of(slot).copy_(part.view(place.view_shape))
            elif group.flat_is_home:
                group.view_of(slot).fill_(float("nan") if group.layout.dtype.is_floating_point else 0)
            if slot in owned:
                segment = owned[slot]
                if value is None:
                    clear_master(group, segment.shard_start, segment.numel)
                else:
                    write_master(group, segment.shard_start, value[segment.start : segment.start + segment.numel])
            if entry.param.is_meta:
                made_real(entry.param, group.layout.dtype, group.flat.device)
            group.faces.put_away_one(slot)
            taken.append((group, slot))
