"""Where state lives changes nothing but speed: every placement gives the same bits, and budgets hold."""

import re

import pytest
import torch
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan, PlanError

PLACEMENTS = [
    {"params": "device", "optimizer": "device"},
    {"params": "host", "optimizer": "host"},
    {"params": "device", "optimizer": "host"},
    {"params": "host", "optimizer": "device"},
    {"params": "host", "optimizer": "disk"},
    {"params": "disk", "optimizer": "disk"},
    {"params": "disk", "optimizer": "host"},
    {"params": "device", "optimizer": "disk"},
    {"params": "disk", "grads": "disk", "optimizer": "disk"},
    {"params": "host", "grads": "disk", "optimizer": "host"},
    {"device_bytes": "some"},  # "auto": a part of the groups on the device, the rest on the host
]


def build(frozen):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)]
    if frozen:
        blocks[2].requires_grad_(False)
    return nn.Sequential(*blocks, nn.Linear(64, 8))


def shard_with_some(model, plan_fields):
    """Half of what all states take on the device, or a little more where that does not hold the work."""
    try:
        unwall.shard(model, Plan(**plan_fields, params="device", optimizer="device", device_bytes=1))
    except PlanError as error:
        all_bytes = int(re.search(r"device_bytes=(\d+)\)", str(error))[1])
    budget = all_bytes // 2
    while True:
        try:
            unwall.shard(model, Plan(**plan_fields, device_bytes=budget))
            return budget
        except PlanError:
            budget = int(budget * 1.1)


def train(stage, dtype, clip, passes, frozen, placement, folder, steps=4):
    rank, _ = rank_and_world()
    model = build(frozen)
    fields = {"stage": stage, "compute_dtype": dtype}
    if "disk" in placement.values():
        fields["disk"] = folder
    if "device_bytes" in placement:
        shard_with_some(model, fields)
    else:
        unwall.shard(model, Plan(**fields, **placement))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, max_grad_norm=clip)
    for step in range(steps):
        for part in range(passes):
            torch.manual_seed(100 * step + 10 * part + rank)
            inputs, target = torch.randn(16, 64), torch.randn(16, 8)
            (model(inputs).float() - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = unwall.stats(model)
    for tier in stats.tiers.values():
        assert tier.budget_bytes is None or tier.peak_bytes <= tier.budget_bytes
    if "disk" in placement.values():
        assert stats.tiers["disk"].live_bytes > 0
    states = optimizer.state_dict()["state"]
    moments = {f"{number}.{name}": value for number, entry in states.items() for name, value in entry.items()}
    return {**model.state_dict(), **moments}, {name: tier.live_bytes for name, tier in stats.tiers.items()}


def compare(stage, dtype, frozen, cases, folder):
    """All placements against everything on the device: names of what differs."""
    wrong = []
    for clip, passes in cases:
        expected = None
        for placement in PLACEMENTS:
            got, live = train(stage, dtype, clip, passes, frozen, placement, folder)
            expected = got if expected is None else expected
            wrong += [f"{placement} {clip} {passes}: {name}" for name in got if not torch.equal(got[name], expected[name])]
            if placement.get("optimizer") == "host" and not live["host"]:
                wrong.append(f"{placement}: nothing is on the host")
            if "device_bytes" in placement and not (live["host"] and live["device"]):
                wrong.append(f"{placement}: not mixed: {live}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("frozen", [False, True])
def test_every_placement_gives_the_same_bits(frozen, dtype, tmp_path):
    assert compare(3, dtype, frozen, [(None, 1), (0.5, 3)], str(tmp_path)) == []


@pytest.mark.parametrize(("stage", "frozen"), [(2, True), (3, False)])
def test_every_placement_gives_the_same_bits_on_two_ranks(ranks, stage, frozen, tmp_path):
    assert ranks(2).run(compare, stage, torch.bfloat16, frozen, [(None, 1), (0.5, 3)], str(tmp_path)) == [[], []]


def test_streaming_from_the_host_needs_little_device_memory():
    model = build(frozen=False)
    whole = sum(param.numel() * 4 for param in model.parameters())
    with pytest.raises(PlanError, match="device_bytes=") as refusal:
        unwall.shard(model, Plan(compute_dtype=torch.float32, params="host", optimizer="host", device_bytes=1))
    budget = int(re.search(r"device_bytes=(\d+)\)", str(refusal.value))[1])
    assert budget < whole  # the parameters alone would not fit
    unwall.shard(model, Plan(compute_dtype=torch.float32, params="host", optimizer="host", device_bytes=budget))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    assert unwall.stats(model).tiers["device"].peak_bytes <= budget


def test_a_host_budget_that_is_too_small_is_refused():
    with pytest.raises(PlanError, match="host_bytes"):
        unwall.shard(build(frozen=False), Plan(params="host", optimizer="host", host_bytes="1KiB"))


def test_gradients_cannot_land_elsewhere_than_the_optimizer_state():
    with pytest.raises(PlanError, match="grads='host'"):
        unwall.shard(build(frozen=False), Plan(grads="host", optimizer="device"))


def test_a_failed_update_is_raised_at_the_next_use():
    """A host update runs after ``step`` has returned: what goes wrong there must not be lost."""
    model = build(frozen=False)
    unwall.shard(model, Plan(params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 64)).float().square().mean().backward()
    optimizer.step()
    unwall.stats(model)
    group = unwall.api.engine(model).groups[0]

    class Broken:
        def done(self):
            return True

        def wait(self, timeout=None):
            raise RuntimeError("the update failed")

    group.pending.update = Broken()
    with pytest.raises(RuntimeError, match="the update failed"):
        model(torch.randn(4, 64))


def test_a_model_larger_than_the_host_budget_is_built_and_trained_on_disk(tmp_path):
    """``init`` lets parts wait on disk; ``shard`` takes them from there. The values are those of a plain build."""
    plan = {"compute_dtype": torch.float32, "params": "disk", "optimizer": "disk", "disk": tmp_path}
    plain = build(frozen=False)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    with unwall.init(Plan(**plan, host_bytes="16KiB")):
        model = build(frozen=False)
    assert any(tmp_path.iterdir()), "nothing waited on disk"
    unwall.shard(model, Plan(**plan))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    unwall.shard(plain, Plan(compute_dtype=torch.float32))
    for trained in (model, plain):
        optimizer = unwall.AdamW(trained.parameters(), lr=1e-2)
        for step in range(3):
            torch.manual_seed(step)
            trained(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
