"""Budgets hold: no tier ever has more than it was given, and what cannot hold is refused before anything is made."""

import subprocess
import sys

import pytest
import torch
from offload import (
    DISK,
    HOST,
    Setup,
    build,
    named_budget,
    over_budget,
    shard_near,
    start,
    states_bytes,
    step,
)

import unwall
from unwall.plans import Plan, PlanError

BLOCKS, BIG = 16, 256


def spilled(setup, folder, width=BIG):
    """Sharded over 10% of its states on the device, 20% on the host and the rest on disk. Gives the plan's fields, too."""
    model = build(blocks=BLOCKS, width=width)
    rank_states = states_bytes(model, setup.dtype)
    fields = {"stage": setup.stage, "compute_dtype": setup.dtype, "passes": setup.passes, "disk": folder}
    fields |= {"device_bytes": rank_states // 10, "host_bytes": rank_states // 5, "disk_bytes": rank_states * 3 // 2}
    unwall.shard(model, Plan(**fields))
    return model, fields


@pytest.mark.parametrize(
    "setup",
    [
        Setup(dtype=torch.bfloat16, clip=0.5),
        Setup(dtype=torch.bfloat16, passes=3),
        Setup(dtype=torch.float32, passes=3),
        Setup(dtype=torch.float16, clip=0.5, passes=2),
    ],
    ids=str,
)
def test_a_tenth_on_the_device_and_a_fifth_on_the_host_are_enough(setup, tmp_path):
    model, fields = spilled(setup, str(tmp_path))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, max_grad_norm=setup.clip)
    for number in range(4):
        step(model, optimizer, setup, number, width=BIG)
    tiers = unwall.stats(model).tiers
    assert {name: tier.budget_bytes for name, tier in tiers.items()} == {
        name: fields[f"{name}_bytes"] for name in ("device", "host", "disk")
    }
    assert over_budget(model) == []
    assert tiers["disk"].live_bytes > states_bytes(model, setup.dtype) // 2


def smallest_fields(setup, placement, folder):
    """Budgets of one byte, each raised to what the refusal names, until the plan is accepted."""
    fields = {"stage": setup.stage, "compute_dtype": setup.dtype, "passes": setup.passes, "disk": folder, **placement}
    return shard_near(build(setup.frozen), **fields, device_bytes=1, host_bytes=1, disk_bytes=1)


@pytest.mark.parametrize("placement", [{}, DISK, HOST, {"params": "host", "optimizer": "disk"}], ids=str)
@pytest.mark.parametrize(
    "setup", [Setup(clip=0.5, passes=3), Setup(dtype=torch.float32, passes=3), Setup(frozen=True)], ids=str
)
def test_the_smallest_budgets_that_are_accepted_are_enough(setup, placement, tmp_path):
    fields = smallest_fields(setup, placement, str(tmp_path))
    model, optimizer = start(setup, fields, str(tmp_path))
    for number in range(4):
        step(model, optimizer, setup, number)
    assert over_budget(model) == []


def train_smallest(setup, placement, folder):
    fields = smallest_fields(setup, placement, folder)
    model, optimizer = start(setup, fields, folder)
    for number in range(4):
        step(model, optimizer, setup, number)
    return over_budget(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_smallest_budgets_are_enough_for_two_ranks(ranks, stage, dtype, tmp_path):
    assert ranks(2).run(train_smallest, Setup(stage=stage, dtype=dtype, clip=0.5, passes=2), {}, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("placement", [{}, HOST], ids=str)
def test_the_smallest_budgets_are_enough_for_gradients_that_stay_on_their_rank(ranks, placement, tmp_path):
    setup = Setup(passes=3, clip=0.5, no_sync=True)
    assert ranks(2).run(train_smallest, setup, placement, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_that_the_host_has_no_room_for_is_refused_before_anything_changes(dtype, tmp_path):
    def run(second):
        setup = Setup(dtype=dtype)
        model, optimizer = start(setup, smallest_fields(setup, HOST, str(tmp_path)), str(tmp_path))
        torch.manual_seed(1)
        for _ in range(2):
            model(torch.randn(4, 64)).float().square().mean().backward()
            if second:
                with pytest.raises(unwall.BudgetError, match=r"sum of several backwards.*Plan\(passes=N\) makes room"):
                    model(torch.ones(4, 64)).float().square().mean().backward()
            optimizer.step()
        assert over_budget(model) == []
        return model.state_dict()

    once, twice = run(second=False), run(second=True)
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_a_sum_whose_room_a_second_optimizer_has_taken():
    """The plan has the passes: what is missing is something else, and the error says so."""
    fields = shard_near(torch.nn.Linear(64, 64), **HOST, passes=2, compute_dtype=torch.float32, device_bytes=1, host_bytes=1)
    fields["host_bytes"] += 25_000  # moments take 33 kB, and the sum that the plan made room for 17 kB
    model = unwall.shard(torch.nn.Linear(64, 64), Plan(**fields))
    both = [unwall.AdamW([param]) for param in model.parameters()]
    model(torch.randn(4, 64)).square().mean().backward()
    for optimizer in both:
        optimizer.step()
    model(torch.randn(4, 64)).square().mean().backward()
    with pytest.raises(unwall.BudgetError, match=r"\(passes=2\), but .* a second optimizer.* host_bytes larger"):
        model(torch.randn(4, 64)).square().mean().backward()
    for optimizer in both:
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_smallest_budget_is_enough_to_look_at_a_model_of_one_group(dtype, tmp_path):
    """What the optimizer's look has in memory is gone when the model's comes to the same group."""
    fields = shard_near(torch.nn.Linear(64, 64), **DISK, disk=str(tmp_path), compute_dtype=dtype, host_bytes=1)
    model = unwall.shard(torch.nn.Linear(64, 64), Plan(**fields))
    optimizer = unwall.AdamW(model.parameters())
    for _ in range(2):
        optimizer.scale(model(torch.randn(4, 64)).float().square().mean()).backward()
        optimizer.step()
        states = optimizer.state_dict()
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(states)
        model.load_state_dict(model.state_dict())
    assert over_budget(model) == []


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_an_impossible_budget_is_refused_with_numbers_and_a_plan_that_fits(tier, tmp_path):
    model = build()
    before = {name: param.clone() for name, param in model.named_parameters()}
    fields = {**DISK, "disk": str(tmp_path)}
    with pytest.raises(PlanError) as refusal:
        unwall.shard(model, Plan(**fields, **{f"{tier}_bytes": 4097}))
    text = str(refusal.value)
    assert f"{tier}_bytes" in text
    assert "4097 bytes" in text
    name, needed_bytes = named_budget(refusal.value)
    assert name == f"{tier}_bytes"
    # nothing was made, and the model is as it was
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    with pytest.raises(RuntimeError, match="not sharded"):
        unwall.stats(model)
    # the named number is the limit: it is accepted, and less is not
    with pytest.raises(PlanError):
        unwall.shard(build(), Plan(**fields, **{name: needed_bytes - 4096}))
    unwall.shard(model, Plan(**fields, **{name: needed_bytes}))


RSS = """
import sys, threading, time
import psutil, torch, unwall
from torch import nn

LAYERS, WIDTH = 40, 1024
folder, how, device_bytes, host_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
plan = unwall.Plan(params="disk", grads="disk", optimizer="disk", disk=folder, device_bytes=device_bytes, host_bytes=host_bytes)

def rss():
    return psutil.Process().memory_info().rss

def train(model, width):
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(4, width)).float().square().mean().backward()
        optimizer.step()
    unwall.stats(model)

train(unwall.shard(nn.Linear(64, 64), plan), 64)  # loads what is loaded at first use
before, peak, done = rss(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, rss())
        time.sleep(0.005)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
with torch.device("meta") if how == "meta" else unwall.init(plan):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
unwall.shard(model, plan)
if how == "meta":
    for layer in range(LAYERS):
        model.load_state_dict({f"{layer}.weight": torch.randn(WIDTH, WIDTH) / WIDTH**0.5}, strict=False)
train(model, WIDTH)
done = True
thread.join()
print(peak - before, 14 * LAYERS * WIDTH * WIDTH)
"""
CONSTANT_BYTES = 120 << 20
"""Threads, and what the allocator keeps: 13 to 45 MiB on a machine that does other things besides, more with huge pages."""


@pytest.mark.parametrize("how", ["meta", "init"])
def test_the_memory_of_the_process_follows_the_budgets_and_not_the_model(how, tmp_path):
    """States of 560 MiB, all on disk: built, loaded and trained in a process that may hold 64 MiB of them."""
    device_bytes, host_bytes = 24 << 20, 40 << 20
    command = [sys.executable, "-c", RSS, str(tmp_path), how, str(device_bytes), str(host_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    grown_bytes, states = map(int, done.stdout.split())
    assert device_bytes + host_bytes + CONSTANT_BYTES < states / 3
    assert grown_bytes <= device_bytes + host_bytes + CONSTANT_BYTES


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_keeps_less_is_judged_with_the_memory_that_is_taken(momentum, tmp_path):
    """Host memory for chunks as large as AdamW's is taken when the model is sharded. A head that comes after, and an optimizer
    with smaller chunks, are judged with it: where they are accepted training goes on."""
    fields = {"compute_dtype": torch.bfloat16, "disk": str(tmp_path), **DISK}
    host_bytes = shard_near(build(), **fields, device_bytes=1, host_bytes=1)["host_bytes"]
    for _ in range(12):
        model = unwall.shard(build(), Plan(**fields, host_bytes=host_bytes))
        model[-1] = torch.nn.Linear(64, 512)
        try:
            optimizer = unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
            break
        except PlanError as refusal:
            _, host_bytes = named_budget(refusal)
        except unwall.BudgetError:
            host_bytes += 8192  # no room for the head alone
    for _ in range(2):
        model(torch.randn(4, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert over_budget(model) == []
