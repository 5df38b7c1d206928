"""``Plan(arenas=True)``: what is held for long is taken from pools of its own, and the values stay the same."""

from contextlib import contextmanager

import pytest
import torch
from models_with_blocks import convolutions, decoder
from torch import nn

import unwall
from unwall.runtime import kept_input, saved_on_host
from unwall.schedule.activations import everywhere
from unwall.schedule.observed import Observed
from unwall.tiers import device as device_tier
from unwall.tiers.device import DeviceTier
from unwall.tiers.input_stack import InputStack


class Counted:
    """In the place of a pool of the accelerator's: knows what is taken from it."""

    made: list["Counted"] = []

    def __init__(self, device, wanted):
        assert wanted
        self.device = torch.device(device)
        self.inside = self.taken = self.renewed = 0
        Counted.made.append(self)

    @contextmanager
    def taking(self):
        self.inside += 1
        self.taken += 1
        try:
            yield
        finally:
            self.inside -= 1

    def renew(self):
        self.renewed += 1


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(Counted, "made", [])
    monkeypatch.setattr(device_tier, "arena_on", lambda device, wanted: Counted(device, wanted) if wanted else None)
    monkeypatch.setattr(kept_input, "MIN_BYTES", 1)
    monkeypatch.setattr(saved_on_host, "MIN_BYTES", 1)
    monkeypatch.setattr(saved_on_host, "IN_FLIGHT_BYTES", 0)
    return Counted.made


def trained(make, **options):
    torch.manual_seed(0)
    model, loss_of = make()
    plan = unwall.Plan(params="host", optimizer="host", compute_dtype=torch.float32, **options)
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


CASES = {
    "recompute": ({"activations": "recompute"}, None),
    "host": ({"activations": "host"}, None),
    "auto": ({"activations": "auto", "device_bytes": "1GiB"}, "recompute"),
}


@pytest.mark.parametrize("make", [decoder, convolutions])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_without(counted, case, make, monkeypatch):
    options, choice = CASES[case]
    if choice is not None:
        monkeypatch.setattr(Observed, "best", lambda self, *_: everywhere(choice, self.blocks))
    losses, values = trained(make, **options)
    assert not counted
    found, state = trained(make, arenas=True, **options)
    assert found == losses
    assert all(torch.equal(state[name], value) for name, value in values.items())
    groups, inputs = counted
    assert groups.taken > 8  # groups come and go in each step
    assert inputs.taken >= (4 * 3 if case == "host" else 3)  # three blocks or more; inputs that stay are in one piece later


class Changes(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x.mul_(2)
        return self.inner(x).sin()


def test_a_block_may_change_its_input_and_run_twice(counted):
    grads = []
    for activations in ("keep", "recompute"):
        torch.manual_seed(0)
        model = nn.Sequential(Changes(), Changes())
        unwall.shard(model, unwall.Plan(activations=activations, arenas=True, compute_dtype=torch.float32))
        x = torch.ones(3, 8, requires_grad=True)
        loss = model(x * 1).square().sum()
        grads += torch.autograd.grad(loss, x, retain_graph=True)
        grads += torch.autograd.grad(loss, x)
    assert counted[-1].taken == 2  # a first pass: each by itself
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_memory_that_is_short_is_looked_for_in_the_pools(counted):
    tier = DeviceTier(torch.device("cpu"), arenas=True)
    taken = []

    def take():
        assert counted[0].inside
        taken.append(1)
        if len(taken) == 1:
            raise torch.OutOfMemoryError("injected")
        return "memory"

    assert tier._insist(take) == "memory"
    assert [arena.renewed for arena in counted] == [1, 1]


def test_without_an_accelerator_there_are_none():
    tier = DeviceTier(torch.device("cpu"), arenas=True)
    assert (tier.arena, tier.inputs_arena) == (None, None)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).sin()


def trained_on(lengths, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    unwall.shard(model, unwall.Plan(params="host", optimizer="host", compute_dtype=torch.float32, **options))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for length in lengths:
        loss = model(torch.ones(length, 8, requires_grad=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_inputs_lie_in_one_piece_that_only_a_longer_sample_enlarges(counted):
    lengths = (64, 64, 48, 16, 64, 128, 96, 128)
    losses = trained_on(lengths, activations="recompute", arenas=True)
    assert losses == trained_on(lengths, activations="recompute")
    inputs = counted[1]
    assert (inputs.taken, inputs.renewed) == (4 + 1 + 1, 2)  # the first pass; then a piece for 64, and one for 128


def test_a_graph_that_is_retained_keeps_its_inputs(counted):
    stack, values = InputStack(Counted("cpu", True)), []
    given = [torch.full((16, 8), float(value)) for value in range(6)]
    for value in given[:3]:
        values.append(stack.copy_of(value))
    assert stack.size_bytes == 0  # how many there are is not known yet
    values.clear()
    values += [stack.copy_of(value) for value in given[:3]]
    assert stack.size_bytes == 3 * 512
    values += [stack.copy_of(value) for value in given[3:]]  # nothing was let go: these are tensors of their own
    assert all(torch.equal(kept, value) for (kept, _), value in zip(values, given, strict=True))
    assert len({kept.untyped_storage().data_ptr() for kept, _ in values}) == 4
    values.clear()
    kept, _ = stack.copy_of(given[5])
    assert torch.equal(kept, given[5])
    assert stack.size_bytes == 6 * 512


def test_passes_that_overlap_are_not_counted_as_one(counted):
    """As a pipeline's do: some input is always held, and few are at once."""
    stack, held = InputStack(Counted("cpu", True)), []
    for _ in range(9):
        del held[:-2]
        held.append(stack.copy_of(torch.ones(16, 8)))
    held.clear()
    stack.copy_of(torch.ones(16, 8))
    assert stack.size_bytes == 3 * 512


def test_a_piece_that_cannot_be_had_is_asked_for_once(counted, monkeypatch):
    arena = Counted("cpu", True)
    stack, asked, empty = InputStack(arena), [], torch.empty

    def no_memory(*size, **options):
        if size[0]:
            asked.append(size[0])
            raise torch.OutOfMemoryError("injected")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", no_memory)
    for _ in range(4):
        kept, begun = stack.copy_of(torch.ones(16, 8))
        assert torch.equal(kept, torch.ones(16, 8))
        del kept, begun
    assert asked == [512]
