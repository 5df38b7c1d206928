"""Gradients on the device without room for the sum of several passes: [Note: one pass] in shards/placement.py."""

import itertools
from dataclasses import replace

import pytest
import torch
from offload import Setup, backward, build, differing, few_chunks, named_budget, outcome, over_budget, smallest
from test_masters_apart import NUMEL, group
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.plans import Plan
from unwall.shards.home import DEVICE, HOST, ONE_PASS, device_bytes_of, disk_bytes_of, host_bytes_of
from unwall.shards.placement import place
from unwall.shards.working import host_working_bytes, working_bytes

SETUP, WIDTH = Setup(blocks=6), 128
SIZES = [replace(group(NUMEL), adds_up=False)] * 12
FEW = [replace(group(NUMEL), adds_up=False), replace(group(3 * NUMEL), adds_up=False), group(NUMEL)]


def held(homes, sizes=SIZES):
    """Bytes on device, host and disk."""
    device = sum(map(device_bytes_of, sizes, homes)) + working_bytes(sizes, homes)
    host = sum(map(host_bytes_of, sizes, homes)) + host_working_bytes(sizes, homes)
    return device, host, sum(map(disk_bytes_of, sizes, homes))


def test_what_would_lie_on_disk_takes_the_room_of_sums_that_nobody_asked_for():
    device, host, _ = held([ONE_PASS] * 8 + [HOST] * 4)
    plan = Plan(disk="/fast", host_bytes=host)
    assert place(SIZES, plan, device, host) == [ONE_PASS] * 8 + [HOST] * 4
    assert place(SIZES, replace(plan, host_bytes=None), device, host).count(ONE_PASS) == 0  # sums may take more of that host
    asked = [replace(size, adds_up=True) for size in SIZES]
    homes = place(asked, plan, device, host)
    assert homes[:7] == [DEVICE] * 7
    assert any(home.on_disk for home in homes)


def test_sums_keep_their_room_where_everything_fits():
    device, host, _ = held([DEVICE] * 8 + [HOST] * 4)
    assert place(SIZES, Plan(disk="/fast", host_bytes=host), device, host) == [DEVICE] * 8 + [HOST] * 4
    assert place(SIZES, Plan(disk="/fast", host_bytes=3 * host), device // 2, 3 * host).count(ONE_PASS) == 0


def test_a_model_that_fits_no_other_way_is_accepted():
    device, host, _ = held([ONE_PASS] * 8 + [HOST] * 4)
    for plan in (Plan(host_bytes=host), Plan()):
        assert place(SIZES, plan, device, host) == [ONE_PASS] * 8 + [HOST] * 4
    alone = held([ONE_PASS] * 12)[0]
    assert place(SIZES, Plan(params="device", optimizer="device"), alone, None) == [ONE_PASS] * 12
    assert place(SIZES, Plan(params="device", optimizer="device"), held([DEVICE] * 12)[0], None) == [DEVICE] * 12


def test_never_more_on_disk_and_never_beyond_a_budget_that_was_enough():
    least, most = held([DEVICE] + [HOST] * 2, FEW), held([DEVICE] * 3, FEW)
    shares = [share / 8 for share in range(13)]
    for of_device, of_host in itertools.product(shares, shares):
        device, host = int(most[0] * of_device), int(least[1] * of_host)
        plan = Plan(disk="/fast", host_bytes=host)
        before = place([replace(size, adds_up=True) for size in FEW], plan, device, host)
        homes = place(FEW, plan, device, host)
        old, new = held(before, FEW), held(homes, FEW)
        beyond = [max(0, total[0] - device) + max(0, total[1] - host) for total in (old, new)]
        assert (beyond[1], new[2]) <= (beyond[0], old[2])
        assert homes[2] != ONE_PASS
        assert homes == before or ONE_PASS in homes


def fields_of(folder, **further):
    """Budgets under which some groups on the device have no room for sums while others have states on disk."""
    fields = {"compute_dtype": SETUP.dtype, "disk": folder, **further}
    fields["device_bytes"] = smallest(model_of(), "device_bytes", **fields) + 600_000
    fields["host_bytes"] = smallest(model_of(), "host_bytes", **fields) + 200_000
    return fields


def model_of():
    return build(blocks=SETUP.blocks, width=WIDTH)


def started(fields):
    model = model_of()
    unwall.shard(model, Plan(**fields))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def homes_of(model):
    return [each.home for each in unwall.api.engine(model).groups]


def step(model, optimizer, number):
    backward(model, optimizer, SETUP, number, WIDTH)
    optimizer.step()
    optimizer.zero_grad()


def test_a_second_backward_is_refused_before_anything_changes(tmp_path):
    with few_chunks():
        fields = fields_of(tmp_path)
        model, optimizer = started(fields)
        assert ONE_PASS in homes_of(model)
        assert any(home.on_disk for home in homes_of(model))
        expected, other = started({**fields, "params": "host", "optimizer": "host", "host_bytes": None})
        for number in range(3):
            step(expected, other, number)
            step(model, optimizer, number)
        assert differing(outcome(expected, other), outcome(model, optimizer)) == []

        backward(expected, other, SETUP, 3, WIDTH)
        backward(model, optimizer, SETUP, 3, WIDTH)
        with pytest.raises(unwall.BudgetError, match=r"device tier: the sum of several backwards.*Plan\(passes=N\)"):
            backward(model, optimizer, SETUP, 4, WIDTH)
        for each in (other, optimizer):
            each.step()
            each.zero_grad()
        step(expected, other, 5)
        step(model, optimizer, 5)
        assert differing(outcome(expected, other), outcome(model, optimizer)) == []
        assert over_budget(model) == []


def test_a_plan_of_several_passes_sets_the_room_aside(tmp_path):
    with few_chunks():
        fields = fields_of(tmp_path, passes=2)
        model, optimizer = started(fields)
        expected, other = started({**fields, "params": "host", "optimizer": "host", "host_bytes": None})
        assert ONE_PASS not in homes_of(model)
        for number in range(2):
            for each, its in ((expected, other), (model, optimizer)):
                backward(each, its, SETUP, 2 * number, WIDTH)
                step(each, its, 2 * number + 1)
        assert differing(outcome(expected, other), outcome(model, optimizer)) == []
        assert over_budget(model) == []


def test_larger_states_take_the_room_of_sums():
    """The plan is judged by AdamW's states when it is sharded."""

    def centered(**fields):
        model = model_of()
        unwall.shard(model, Plan(compute_dtype=SETUP.dtype, params="device", optimizer="device", **fields))
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True, momentum=0.9)
        return model, unwall.wrap(optimizer)

    least = smallest(model_of(), "device_bytes", compute_dtype=SETUP.dtype, params="device", optimizer="device")
    with pytest.raises(unwall.PlanError, match="does not fit RMSprop") as refusal:
        centered(device_bytes=least)
    budget = named_budget(refusal.value)[1]
    (model, optimizer), (expected, other) = centered(device_bytes=budget), centered()
    assert set(homes_of(model)) == {ONE_PASS}
    for each, its in ((model, optimizer), (expected, other)):
        step(each, its, 0)
        backward(each, its, SETUP, 1, WIDTH)
    with pytest.raises(unwall.BudgetError, match=r"sum of several backwards.*Plan\(passes=N\)"):
        backward(model, optimizer, SETUP, 2, WIDTH)
    for its in (optimizer, other):
        its.step()
    assert differing(expected.state_dict(), model.state_dict()) == []
    assert over_budget(model) == []


class Shared(nn.Module):
    """Each block runs twice, in reentrant checkpoints: its gradients come twice in one backward."""

    def __init__(self):
        super().__init__()
        self.inner = model_of()

    def forward(self, x):
        x = x.clone().requires_grad_()
        for block in 2 * list(self.inner[:-1]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.inner[-1](x)


def shared(**fields):
    torch.manual_seed(0)
    model = Shared()
    unwall.shard(model, Plan(**fields))
    return model, unwall.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_checkpoints_share_is_added_up_or_refused_with_what_to_write(tier):
    fields = {"compute_dtype": SETUP.dtype, "params": tier, "optimizer": tier, "activations": "keep"}
    budget = f"{tier}_bytes"
    model, optimizer = shared(**fields, **{budget: smallest(Shared(), budget, **fields)})
    with pytest.raises(unwall.BudgetError, match=rf"{tier} tier: .*reentrant checkpoints.*Plan\(passes=2\)"):
        backward(model, optimizer, SETUP, 0, WIDTH)
    results = []
    for further in ({}, {"passes": 2, budget: smallest(Shared(), budget, **fields, passes=2)}):
        model, optimizer = shared(**fields, **further)
        for number in range(3):
            step(model, optimizer, number)
        assert over_budget(model) == []
        results.append(outcome(model, optimizer))
    assert differing(*results) == []
