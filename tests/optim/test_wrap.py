"""``unwall.wrap`` on every tier: the values of plain PyTorch, the same bits wherever the states live, faults, budgets."""

import contextlib
import copy
import errno
import functools
import gc
from dataclasses import replace

import pytest
import torch
from models import NestedNet
from offload import (
    DEVICE,
    DISK,
    HOST,
    Setup,
    build,
    differing,
    few_chunks,
    homes,
    mixed_plan,
    named_budget,
    over_budget,
    smallest,
    step,
)
from reference import FP32, Case, assert_close, draw, mse, plain_iteration, seeded, train_plain, whole_state
from torch import nn

import unwall
from unwall.plans import Plan, PlanError

SPILLED = {"params": "host", "optimizer": "disk"}
MIXED_HOMES = {"params": "disk", "grads": "disk", "optimizer": "host"}
PLACEMENTS = {"host": HOST, "disk": DISK, "optimizer-on-disk": SPILLED, "params-and-grads-on-disk": MIXED_HOMES}


class Counting(torch.optim.Optimizer):
    """Keeps its count of steps on itself, and a state that begins with the first gradient."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self):
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["mean"] = state["mean"] + (param.grad - state["mean"]) / self.count if state else param.grad.clone()
                    param.data = param - group["lr"] / self.count * state["mean"]


def sgd(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1)


def adagrad(params):
    return torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1, lr_decay=0.1)


def rmsprop(params):
    """Three states: more than AdamW has."""
    return torch.optim.RMSprop(params, lr=1e-3, momentum=0.5, centered=True, eps=1e-3)


def nadam(params):
    return torch.optim.NAdam(params, lr=1e-2)


def amsgrad(params):
    return torch.optim.Adam(params, lr=1e-2, amsgrad=True, eps=1e-3)


OPTIMIZERS = {make.__name__: make for make in (sgd, adagrad, rmsprop, nadam, amsgrad, Counting)}


def start(make, setup, placement, folder):
    model = build(setup.frozen, setup.blocks)
    fields = {"stage": setup.stage, "compute_dtype": setup.dtype, "passes": setup.passes, "disk": folder, **placement}
    unwall.shard(model, Plan(**fields))
    return model, unwall.wrap(make(model.parameters()), max_grad_norm=setup.clip)


def scalars_apart(model, optimizer):
    """Parameters and states, with what the inner optimizer keeps beside tensors as tensors, too."""
    states = copy.copy(optimizer.state_dict()["state"])
    found = {**model.state_dict()}
    for number, entry in states.items():
        for name, value in {**entry, **entry["inner"]}.items():
            if name != "inner":
                found[f"{number}.{name}"] = torch.as_tensor(value).clone()
    return found


def train(make, setup, placement, folder):
    model, optimizer = start(make, setup, placement, folder)
    for number in range(setup.steps):
        step(model, optimizer, setup, number)
    assert over_budget(model) == []
    return scalars_apart(model, optimizer), homes(model)


SETUPS = {
    "sgd": Setup(blocks=4),
    "adagrad": Setup(blocks=4, dtype=torch.float32, clip=0.5),
    "rmsprop": Setup(blocks=4, clip=0.1, frozen=True),
    "nadam": Setup(blocks=4, dtype=torch.float16),
    "amsgrad": Setup(blocks=4, passes=2),
    "Counting": Setup(blocks=4, dtype=torch.float32),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_wherever_the_states_live(name, tmp_path):
    make, setup = OPTIMIZERS[name], SETUPS[name]
    expected, _ = train(make, setup, DEVICE, str(tmp_path))
    assert any(not torch.equal(expected[key], value) for key, value in build(setup.frozen, 4).state_dict().items())
    for label, placement in PLACEMENTS.items():
        got, _ = train(make, setup, placement, str(tmp_path))
        assert differing(expected, got) == [], label


@few_chunks()
def test_the_same_bits_with_groups_on_all_tiers(tmp_path):
    setup = Setup()
    expected, _ = train(adagrad, setup, DEVICE, str(tmp_path))
    got, tiers = train(adagrad, setup, mixed_plan(setup, str(tmp_path)), str(tmp_path))
    assert tiers == {"device", "host", "disk"}
    assert differing(expected, got) == []


def train_here(name, placement, folder):
    setup = replace(SETUPS[name], steps=2)
    return train(OPTIMIZERS[name], setup, placement, f"{folder}")[0]


@pytest.mark.parametrize("name", ["nadam", "rmsprop"])
def test_the_same_bits_over_two_ranks(ranks, name, tmp_path):
    """Ranks own parts of parameters, or nothing of them; rank 0 saves what the inner optimizer counts all the same."""
    expected = ranks(2).run(train_here, name, DEVICE, str(tmp_path))[0]
    got = ranks(2).run(train_here, name, DISK, str(tmp_path))[0]
    assert differing(expected, got) == []
    steps = [value for key, value in got.items() if key.endswith(".step")]
    assert steps
    assert all(float(value) == 2 for value in steps)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("placement", ["device", "disk"])
def test_the_values_of_plain_pytorch(name, placement, tmp_path):
    make = OPTIMIZERS[name]
    expected = train_plain(Case(build=NestedNet), optimizer=lambda model: make(model.parameters())).state
    model = seeded(NestedNet)
    where = {"device": DEVICE, "disk": DISK}[placement]
    unwall.shard(model, Plan(compute_dtype=torch.float32, disk=tmp_path, **where))
    optimizer = unwall.wrap(make(model.parameters()))
    case = Case(build=NestedNet)
    for number in range(5):
        plain_iteration(case, model, optimizer, draw(case, number, 0, 1), number, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(expected, whole_state(model))


def test_bf16_keeps_the_master_of_plain_pytorch(tmp_path):
    """Gradients that bf16 holds exactly, given to both: the fp32 masters are equal bit by bit."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5000, generator=torch.Generator().manual_seed(0)))

        def forward(self, x):
            return (self.weight * x).sum()

    inputs = [torch.randn(5000, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(1, 5)]
    for make in (sgd, adagrad, nadam):
        plain = Scaled()
        reference = make(plain.parameters())
        model = Scaled()
        unwall.shard(model, Plan(compute_dtype=torch.bfloat16, disk=tmp_path, **DISK))
        optimizer = unwall.wrap(make(model.parameters()))
        for grad in inputs:
            plain.weight.grad = grad.float()
            reference.step()
            model(grad).backward()
            optimizer.step()
        assert torch.equal(model.state_dict()["weight"], plain.weight.detach())


@pytest.mark.parametrize("name", ["adagrad", "amsgrad"])
@pytest.mark.parametrize(("first", "then"), [(DEVICE, DISK), (DISK, HOST)], ids=["device-to-disk", "disk-to-host"])
def test_a_checkpoint_goes_on_on_another_tier(name, first, then, tmp_path):
    make, setup = OPTIMIZERS[name], SETUPS[name]
    expected, _ = train(make, setup, DEVICE, str(tmp_path))
    model, optimizer = start(make, setup, first, str(tmp_path))
    for number in range(setup.steps - 1):
        step(model, optimizer, setup, number)
    other, resumed = start(make, setup, then, str(tmp_path))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    step(other, resumed, setup, setup.steps - 1)
    assert differing(expected, scalars_apart(other, resumed)) == []


def test_a_state_dict_of_another_optimizer_is_refused():
    model = NestedNet()
    unwall.shard(model, FP32)
    other = unwall.wrap(sgd(model.parameters()))
    mse(model, draw(Case(build=NestedNet), 0, 0, 1)).backward()
    other.step()
    with pytest.raises(ValueError, match=r"no 'betas'.*another optimizer"):
        unwall.wrap(amsgrad(model.parameters())).load_state_dict(other.state_dict())


def insist(call, optimizer, errors, times=4):
    """Runs the batch again, or looks again, when the disk fails."""
    for _ in range(times):
        try:
            return call()
        except OSError as error:
            errors.append(error)
            optimizer.zero_grad()
    raise AssertionError(f"failed {times} times, the last time with: {errors[-1]}")


@pytest.mark.parametrize("op", ["read", "write"])
def test_disk_faults_are_raised_and_overcome(op, tmp_path):
    setup = Setup(blocks=2, steps=2)
    expected, _ = train(rmsprop, setup, DISK, str(tmp_path))
    hits = 0
    for position in range(0, 140, 9):
        model, optimizer = start(rmsprop, setup, DISK, str(tmp_path))
        disk = unwall.api.engine(model).tiers.disk
        disk.engine.inject_fault(op, position, 1, errno.EIO)
        errors: list[OSError] = []
        for number in range(setup.steps):
            insist(functools.partial(step, model, optimizer, setup, number), optimizer, errors)
        got = insist(functools.partial(scalars_apart, model, optimizer), optimizer, errors)
        assert differing(expected, got) == [], f"{op} {position}: {errors}"
        assert all("group " in str(error) and str(tmp_path) in str(error.filename) for error in errors)
        hits += bool(errors)
        disk.close()
    assert hits > 5


BUDGETS = {"device_bytes": DEVICE, "host_bytes": HOST, "disk_bytes": DISK}


@pytest.mark.parametrize("name", BUDGETS)
def test_states_that_do_not_fit_are_refused_with_the_number_that_does(name, tmp_path):
    """The budget is about the smallest that ``shard`` accepts, which counts AdamW's states."""
    setup, fields = Setup(blocks=4), {"disk": str(tmp_path), **BUDGETS[name]}
    least = smallest(build(blocks=4), name, **fields)
    with contextlib.suppress(PlanError):  # groups are smaller where the device is, so it may do with less than it says
        while True:
            unwall.shard(build(blocks=4), Plan(**fields, **{name: least * 31 // 32}))
            least = least * 31 // 32
    for make in (sgd, torch.optim.Adam):  # no more states than AdamW has
        start(make, setup, {**fields, name: least}, str(tmp_path))
    with pytest.raises(
        PlanError, match=r"does not fit RMSprop \(its states: grad_avg, momentum_buffer, square_avg\)"
    ) as refusal:
        start(rmsprop, setup, {**fields, name: least}, str(tmp_path))
    field, needed = named_budget(refusal.value)
    assert field == name
    assert needed > least
    for budget in (needed - 1, needed):
        try:
            model, optimizer = start(rmsprop, setup, {**fields, name: budget}, str(tmp_path))
        except PlanError:
            assert budget == needed - 1
    for number in range(2):
        step(model, optimizer, setup, number)
    scalars_apart(model, optimizer)
    assert over_budget(model) == []


def test_what_only_a_cycle_keeps_does_not_count_against_the_next_optimizer():
    setup, fields = Setup(blocks=4), {**DEVICE, "device_bytes": smallest(build(blocks=4), "device_bytes", **DEVICE)}
    gc.collect()
    gc.disable()  # nobody else is to find the cycle
    try:
        model, optimizer = start(torch.optim.Adam, setup, fields, None)
        step(model, optimizer, setup, 0)
        optimizer.itself = optimizer
        del optimizer
        optimizer = unwall.wrap(torch.optim.Adam(model.parameters(), lr=1e-2))
        step(model, optimizer, setup, 1)
    finally:
        gc.enable()
    assert over_budget(model) == []


def test_wrap_takes_no_more_than_adamw(tmp_path):
    """The master is split as AdamW's, so Adam wrapped is the size of AdamW."""
    held = []
    for make in (unwall.AdamW, lambda params: unwall.wrap(torch.optim.Adam(params))):
        model = build(blocks=4)
        unwall.shard(model, Plan(compute_dtype=torch.bfloat16, disk=tmp_path, **SPILLED))
        optimizer = make(model.parameters())
        assert optimizer.param_groups
        held.append({name: tier.live_bytes for name, tier in unwall.stats(model).tiers.items()})
    assert held[0] == held[1]


def test_an_option_that_asks_for_a_new_state(tmp_path):
    """Momentum from the third step on: its state comes into being then, on disk, as with plain PyTorch."""

    def run(model, optimizer):
        for number in range(4):
            if number == 2:
                optimizer.param_groups[0]["momentum"] = 0.9
            mse(model, draw(Case(build=NestedNet), number, 0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_state(model)

    plain, model = seeded(NestedNet), seeded(NestedNet)
    expected = run(plain, torch.optim.SGD(plain.parameters(), lr=1e-2))
    unwall.shard(model, Plan(compute_dtype=torch.float32, disk=tmp_path, **DISK))
    assert_close(expected, run(model, unwall.wrap(torch.optim.SGD(model.parameters(), lr=1e-2))))


def test_an_optimizer_that_has_trained_already_keeps_its_states():
    """Wrapped after it was used on the plain model, and given states of its own."""
    plain = seeded(NestedNet)
    reference = amsgrad(plain.parameters())
    mse(plain, draw(Case(build=NestedNet), 0, 0, 1)).backward()
    reference.step()
    model = copy.deepcopy(plain)
    inner = amsgrad(model.parameters())
    unwall.shard(model, FP32)
    inner.load_state_dict(reference.state_dict())
    optimizer = unwall.wrap(inner)
    for net, stepper in ((plain, reference), (model, optimizer)):
        stepper.zero_grad()
        mse(net, draw(Case(build=NestedNet), 1, 0, 1)).backward()
        stepper.step()
    assert_close(plain.state_dict(), whole_state(model))


def test_a_failing_optimizer_says_why(tmp_path):
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if Failing.fails and self.param_groups[0]["params"][0].numel() > 48:
                raise ArithmeticError("no more")
            return super().step(closure)

    model = build(blocks=2)
    unwall.shard(model, Plan(disk=tmp_path, **DISK))
    optimizer = unwall.wrap(Failing(model.parameters(), lr=1e-2))
    Failing.fails = True
    step(model, optimizer, Setup(), 0)
    with pytest.raises(RuntimeError, match="ArithmeticError: no more"):
        model.state_dict()
