"""Nodes: parameters that each node keeps once more, and gradients that are summed inside it first. Four ranks as two nodes."""

import os

import pytest
import torch
import torch.distributed as dist
from faults import Boom
from faults import forward as forward_net
from offload import DEVICE, DISK, HOST, Setup, backward, differing, named_budget, outcome, over_budget, start, step
from ranks import rank_and_world
from reference import seeded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import unwall
from unwall.plans import Plan, PlanError
from unwall.shards.build import group_sizes
from unwall.shards.control import PeerError
from unwall.shards.home import DEVICE as DEVICE_HOME
from unwall.shards.home import device_bytes_of, host_bytes_of
from unwall.shards.layout import build_layout
from unwall.shards.nodes import per_node_of
from unwall.shards.placement import place
from unwall.shards.working import working_bytes

BF16, FP16 = torch.bfloat16, torch.float16
KNOWN, REPLICA = {"node_ranks": 2}, {"node_ranks": 2, "replica": "node"}
PACKED = {"gather_dtype": "int8"}
SMALL = {"blocks": 3, "steps": 2}


def forget(model):
    """What was gathered leaves the device, as where room is short."""
    unwall.api.engine(model).executor.drop_cache()


def train(setup, fields, folder):
    """The outcome, and how often the parameters came from other nodes in the last step, where backward finds nothing of forward
    on the device."""
    model, optimizer = start(setup, fields, folder)
    model.register_forward_hook(lambda *_: forget(model))
    for number in range(setup.steps):
        forget(model)
        unwall.stats(model).reset()
        step(model, optimizer, setup, number)
    far_bytes = unwall.stats(model).collectives["all_gather"].far_bytes
    travels = (group.travels for group in unwall.api.engine(model).groups)
    return outcome(model, optimizer), 2 * far_bytes / sum(numel * dtype.itemsize for _, numel, dtype in travels)


def compare(cases, folder):
    """By case: what differs with a replica, and how often the parameters came from other nodes without and with one."""
    found = []
    for setup, fields in cases:
        expected, without = train(setup, {**KNOWN, **fields}, folder)
        got, times = train(setup, {**REPLICA, **fields}, folder)
        found.append((differing(expected, got), without, times))
    return found


CASES = [
    (Setup(dtype=BF16, clip=0.5, **SMALL), DEVICE),
    (Setup(dtype=BF16, passes=2, **SMALL), {**HOST, **PACKED}),
    (Setup(dtype=FP16, **SMALL), {**DISK, **PACKED}),
    (Setup(dtype=torch.float32, stage=2, **SMALL), HOST),
]


def test_the_same_bits_and_only_the_first_gather_between_nodes(ranks, tmp_path):
    found = ranks(4).run(compare, CASES, str(tmp_path))[0]
    assert [differences for differences, _, _ in found] == [[]] * len(CASES)
    assert [times for _, _, times in found] == [1.0] * len(CASES)
    assert min(without for _, without, _ in found) >= 1.5


@pytest.mark.drill
def test_every_combination_of_tiers(ranks, tmp_path):
    places = [DEVICE, HOST, DISK, {"params": "host", "optimizer": "disk"}]
    setups = [Setup(dtype=dtype, frozen=True, **SMALL) for dtype in (BF16, FP16)]
    cases = [(setup, {**place, **way}) for setup in setups for place in places for way in ({}, PACKED)]
    found = ranks(4).run(compare, cases, str(tmp_path))[0]
    assert [differences for differences, _, _ in found] == [[]] * len(cases)
    assert max(times for _, _, times in found) < 1  # frozen groups never travel again


# -- whatever changes the parameters ---------------------------------------------------------------------------------------


def seen_after_writes(fields, folder):
    """What a forward gives after each way to write, with nothing on the device before it, and what came from other nodes."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    model[1].requires_grad_(False)
    unwall.shard(model, Plan(**DEVICE, **fields))
    optimizer, found, far = unwall.AdamW(model.parameters(), lr=1e-2), [], []

    def look():
        for _ in range(2):
            unwall.stats(model).reset()
            forget(model)
            with torch.no_grad():
                found.append(model(torch.ones(2, 64)))
            far.append(unwall.stats(model).collectives["all_gather"].far_bytes)

    look()
    unwall.save(f"{folder}/{len(fields)}", model)
    with unwall.full_params(model, write=True), torch.no_grad():
        model[0].weight[0, 0] = 3.0
    look()
    state = model.state_dict()
    state = unwall.api.engine(model).ranks.broadcast_object({name: value * 0.5 for name, value in state.items()})
    model.load_state_dict(state)
    look()
    model(torch.ones(2, 64)).float().square().mean().backward()
    optimizer.step()
    look()
    optimizer.states(model[2].weight)["master"] = torch.zeros_like(optimizer.states(model[2].weight)["master"])
    look()
    unwall.load(f"{folder}/{len(fields)}", model)
    look()
    return found, far, {name: value.clone() for name, value in model.state_dict().items()}


def test_a_replica_is_never_out_of_date(ranks, tmp_path):
    runs = [ranks(4).run(seen_after_writes, fields, str(tmp_path)) for fields in (KNOWN, REPLICA)]
    for (plain, _, state), (found, far, kept) in zip(*runs, strict=True):
        assert len(plain) == len(found) == 12
        assert all(torch.equal(first, second) for first, second in zip(plain, found, strict=True))
        assert differing(state, kept) == []
        assert far[1::2] == [0] * 6  # what was seen is seen again from the node
        assert min(far[::2]) > 0
        assert far[6] < far[0]  # the frozen group was not updated


class Experts(nn.Module):
    """Each rank uses an expert of its own, in an order of its own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.out = nn.Linear(64, 8)

    def forward(self, x):
        rank, _ = rank_and_world()
        for index in (rank, 4) if rank else (4, rank):
            x = torch.tanh(self.experts[index](x))
        return self.out(x)


def route(fields):
    """The model after some steps, and what the device holds after each."""
    model, live = seeded(Experts), []
    unwall.shard(model, Plan(**DEVICE, **fields))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    for number in range(6):
        torch.manual_seed(number)
        loss = model(torch.randn(8, 64)).float().square().mean()
        if rank_and_world()[0] != number % 4:  # the ranks need to fetch at different times
            forget(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        forget(model)
        live.append(unwall.stats(model).tiers["device"].live_bytes)
    return {name: value.clone() for name, value in model.state_dict().items()}, live


def test_ranks_may_need_other_groups_at_other_times(ranks):
    """A rank that has no gradient of an expert serves those that have, in both hops."""
    plain, _ = ranks(4).run(route, KNOWN)[0]
    for fields in ({}, {"reduce_dtype": "int8"}):
        found, live = ranks(4).run(route, {**REPLICA, **fields})[0]
        assert max(live) == min(live)
        if fields:
            assert all(value.isfinite().all() for value in found.values())
        else:
            assert differing(plain, found) == []


def struck(fields):
    """A run in which rank 1 fails in forward and in backward, and all go on."""
    rank, told = rank_and_world()[0], []
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    unwall.shard(model, Plan(**fields))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, speculate=False)

    def boom(*_):
        raise Boom("told to")

    for number in range(5):
        for attempt in range(3):
            handle = None
            if rank == 1 and attempt == 0 and number in (2, 4):
                hook = model[2][0].register_forward_hook if number == 2 else model[2][0].register_full_backward_hook
                handle = hook(boom)
            try:
                loss = forward_net(model, number)
                forget(model)
                loss.backward()
                optimizer.step()
                break
            except (Boom, PeerError) as error:
                told.append(type(error).__name__)
                optimizer.zero_grad()
            finally:
                if handle is not None:
                    handle.remove()
    return told, {name: value.isfinite().all().item() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("fields", [{**PACKED, "reduce_dtype": "int8"}, {"stage": 1, **HOST, "reduce_dtype": "int4"}], ids=str)
def test_all_ranks_go_on_after_a_fault_of_one(ranks, fields):
    (told, finite), (own, _), *_ = ranks(4).run(struck, {**fields, **REPLICA})
    assert told == ["PeerError", "PeerError"]
    assert own == ["Boom", "Boom"]
    assert all(finite.values())


# -- two hops --------------------------------------------------------------------------------------------------------------


def reduced(fields, nodes):
    """The gradient of a step, and what came of it from other ranks and from other nodes, over elements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "dp")) if nodes == "mesh" else None
    if nodes == "torchrun":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        model = seeded(lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(2)]))
        unwall.shard(model, Plan(**DEVICE, **fields), mesh)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.manual_seed(rank_and_world()[0])
    model(torch.randn(4, 256)).float().square().mean().backward()
    found = unwall.stats(model).collectives["reduce_scatter"]
    optimizer = unwall.AdamW(model.parameters())
    norm = float(optimizer.clip_grad_norm_(1e9))
    grads = [param.grad.clone() for param in model.parameters()]
    return grads, found.bytes / found.elements, found.far_bytes / found.elements, norm


@pytest.mark.parametrize(
    ("fields", "nodes", "most"),
    [
        ({"reduce_dtype": "int8"}, "mesh", 0.02),
        ({"reduce_dtype": "int4", "replica": "node"}, "torchrun", 0.25),
        ({"reduce_dtype": "int8", "node_ranks": 2, "stage": 0, "compute_dtype": FP16}, "plan", 0.02),
    ],
    ids=str,
)
def test_gradients_are_summed_inside_a_node_and_travel_packed_between_them(ranks, fields, nodes, most):
    plain = {name: value for name, value in fields.items() if name in ("stage", "compute_dtype")}
    exact, found = ranks(4).run(reduced, plain, "plan"), ranks(4).run(reduced, fields, nodes)
    per_element = 0.516 if fields["reduce_dtype"] == "int4" else 1.016
    again = 2 * 3 / 4 if fields.get("stage") == 0 else 0  # the sums are gathered as they are
    for (one, _, none, norm), (other, nbytes, far, its) in zip(exact, found, strict=True):
        assert none == 0
        assert far == pytest.approx(per_element / 4 + again * 2 / 3, rel=0.03)
        assert nbytes == pytest.approx(per_element / 4 + 2 / 2 + again, rel=0.03)
        assert its == pytest.approx(norm, rel=most)
        for first, second in zip(one, other, strict=True):
            assert float((first - second).float().norm()) <= most * float(first.float().norm())


# -- room and plans --------------------------------------------------------------------------------------------------------


def room(fields):
    """Where the replicas are and what they take, of the whole model in the compute dtype, within the smallest budget."""
    setup, budget = Setup(dtype=BF16, blocks=8), 1
    for _ in range(4):
        try:
            model, optimizer = start(setup, {**fields, "device_bytes": budget}, "unused")
            break
        except PlanError as error:
            budget = named_budget(error)[1]
    for number in range(2):
        step(model, optimizer, setup, number)
    groups = unwall.api.engine(model).groups
    replicas = [group.replica.block for group in groups]
    share = sum(block.nbytes for block in replicas) / sum(group.layout.flat_bytes for group in groups)
    return {block.tier for block in replicas}, share, over_budget(model)


def test_a_replica_is_a_share_of_a_node_and_within_the_budget(ranks):
    assert ranks(4).run(room, {**DEVICE, **REPLICA})[0] == ({"device"}, 0.5, [])
    assert ranks(4).run(room, {**HOST, **REPLICA, "reduce_dtype": "int4"})[0] == ({"host"}, 0.5, [])


def test_a_replica_is_on_the_host_where_the_device_has_no_room():
    plan = Plan(**DEVICE, **REPLICA)
    layout = build_layout(["weight"], [torch.Size((4096, 64))], BF16, 4, [None])
    sizes = [group_sizes(layout, 10, True, plan, 4)] * 3
    bare = [group_sizes(layout, 10, True, Plan(**DEVICE), 4)] * 3
    least = 3 * device_bytes_of(bare[0], DEVICE_HOME) + working_bytes(bare, [DEVICE_HOME] * 3)
    replica = layout.flat_bytes // 2
    assert [size.replica_bytes for size in sizes] == [replica] * 3
    for spare, tiers in ((0, "hhh"), (replica, "dhh"), (3 * replica - 1, "ddh"), (3 * replica, "ddd"), (None, "ddd")):
        homes = place(sizes, plan, None if spare is None else least + spare, None)
        assert "".join(home.replica[0] for home in homes) == tiers
        assert sum(host_bytes_of(*pair) for pair in zip(sizes, homes, strict=True)) == tiers.count("h") * replica


def moved(folder):
    """States move to another tier, and the replicas with them."""
    setup, found = Setup(dtype=BF16, **SMALL), []
    for fields in (KNOWN, REPLICA):
        model, optimizer = start(setup, {**DEVICE, **fields}, folder)
        for number, home in enumerate((HOST, DEVICE)):
            backward(model, optimizer, setup, number)
            optimizer.step()
            plan = {"stage": 3, "compute_dtype": BF16, "disk": folder, **home, **fields}
            unwall.move(model, Plan(**plan))
        step(model, optimizer, setup, 5)
        found.append(outcome(model, optimizer))
    return differing(*found), {group.replica.block.tier for group in unwall.api.engine(model).groups}


def test_a_replica_moves(ranks, tmp_path):
    assert ranks(4).run(moved, str(tmp_path))[0] == ([], {"device"})


def refused(fields, local):
    if local is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local
    try:
        unwall.shard(nn.Linear(8, 8), Plan(**fields))
    except PlanError as error:
        return str(error)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    return ""


@pytest.mark.parametrize(
    ("fields", "local", "words"),
    [
        ({"replica": "node"}, None, "nothing says how many ranks a node has"),
        ({"replica": "node"}, "1", "one rank per node"),
        ({"replica": "node", "node_ranks": 3}, None, "no multiple of that"),
        ({"replica": "node"}, "4", ""),  # one node: there is nothing to gain, and nothing to keep
    ],
)
def test_nodes_that_cannot_be_are_refused(ranks, fields, local, words):
    for said in ranks(4).run(refused, fields, local):
        assert (words in said) if words else said == ""


def test_a_plan_with_a_replica_that_cannot_be_is_refused():
    for fields, words in [
        ({"replica": "rack"}, "replica is 'node' or None"),
        ({"replica": "node", "stage": 0}, "stage 0 never does"),
        ({"node_ranks": 0}, "node_ranks is a whole number"),
    ]:
        with pytest.raises(PlanError, match=words):
            Plan(**fields)


def test_nodes_are_runs_of_equal_length():
    assert per_node_of([0, 0, 1, 1]) == 2
    assert per_node_of([5, 5, 5]) == 3
    with pytest.raises(ValueError, match="not neighbours"):
        per_node_of([0, 1, 0, 1])
    with pytest.raises(ValueError, match="unequal"):
        per_node_of([0, 0, 1])


def begin_beside_another_group():
    """Ranks 0 and 1 are in a process group more than the others."""
    dist.new_group([0, 1])
    model = unwall.shard(nn.Linear(8, 8), Plan(**REPLICA))
    return unwall.api.engine(model).ranks.nodes.per_node


def test_ranks_in_unequal_numbers_of_process_groups(ranks):
    assert ranks(4).run(begin_beside_another_group) == [2] * 4


def set_on_one_rank():
    """Rank 0 alone writes to its part of a parameter of which all ranks hold copies."""
    mesh = DeviceMesh.from_group(dist.new_group(list(range(4))), "cpu")  # of its own: its ranks cannot go on
    model = unwall.shard(nn.Linear(8, 8), Plan(**REPLICA), mesh)
    optimizer = unwall.AdamW(model.parameters())
    x = torch.ones(2, 8)
    model(x)
    if rank_and_world()[0] == 0:
        states = optimizer.states(model.weight)
        states.set_part("master", states.part("master") + 1)
    try:
        model(x).sum().backward()
        optimizer.step()
    except unwall.DivergedError as error:
        return str(error)
    return ""


def test_a_part_of_a_master_is_set_on_all_ranks_or_refused(ranks):
    errors = ranks(4).run(set_on_one_rank)
    assert all("set_part('master')" in error for error in errors), errors
