"""Values that change where nobody looks at first: ``p.data = tensor``, ``state_dict()``, an optimizer that was wrapped."""

import copy
import io
import pickle
import signal
import sys
import threading

import pytest
import torch
from reference import seeded
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import StepLR

import unwall
from unwall.native import interrupts
from unwall.plans import Plan
from unwall.runtime import given_copies, lent
from unwall.shards.flat import storage_uses

TIERS = {"device": {}, "host": {"params": "host", "optimizer": "host"}, "disk": {"params": "disk", "optimizer": "disk"}}


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def sharded(tier, folder):
    return unwall.shard(seeded(build), Plan(compute_dtype=torch.float32, disk=folder, **TIERS[tier]))


def inputs(seed):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, steps):
    for step in range(steps):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model):
    return [param.detach().clone() for param in model.parameters()]


def apply_and_restore(model, optimizer):
    """As averages are evaluated."""
    average = {name: 0.5 * param.data.clone() for name, param in model.named_parameters()}
    train(model, optimizer, 2)
    backup = {}
    for name, param in model.named_parameters():
        backup[name] = param.data
        param.data = average[name]
    yield model(inputs(9))
    for name, param in model.named_parameters():
        param.data = backup[name]
    train(model, optimizer, 1)


def swapped(model, optimizer):
    others = [torch.full_like(param, 0.1) for param in model.parameters()]
    for param, other in zip(model.parameters(), others, strict=True):
        param.data, other.data = other.data, param.data
    yield from others
    yield model(inputs(9))
    for param, other in zip(model.parameters(), others, strict=True):
        param.data, other.data = other.data, param.data
    train(model, optimizer, 1)


def turned_and_written_later(model, optimizer):
    first = model[0].weight
    first.data = first.data.t()
    given = torch.full((4,), 0.3)
    model[2].bias.data = given
    given.mul_(2)
    yield model(inputs(9))
    train(model, optimizer, 2)


@pytest.mark.parametrize("use", [apply_and_restore, swapped, turned_and_written_later])
@pytest.mark.parametrize("tier", TIERS)
def test_data_that_is_replaced_leaves_the_old_values_to_their_holders(tier, use, tmp_path):
    plain, model = seeded(build), sharded(tier, tmp_path)
    expected = [value.detach().clone() for value in use(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))]
    got = [value.detach().clone() for value in use(model, unwall.AdamW(model.parameters(), lr=1e-2))]
    for one, other in zip([*expected, *values(plain)], [*got, *values(model)], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tier", TIERS)
def test_a_write_to_what_state_dict_gave_is_told(tier, tmp_path):
    model = sharded(tier, tmp_path)
    model.state_dict()["2.bias"].fill_(1.0)
    with pytest.raises(RuntimeError, match=r"2\.bias was written in model\.state_dict\(\)"):
        model(inputs(0))
    model(inputs(0))
    taken = model.state_dict()
    for value in taken.values():
        value.mul_(0.5)
    model.load_state_dict(taken)
    model(inputs(0))
    for one, other in zip(seeded(build).parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.detach(), 0.5 * one.detach())
    mine = copy.deepcopy(model.state_dict())
    mine["2.bias"].zero_()
    kept = model.state_dict()
    train(model, unwall.AdamW(model.parameters()), 1)
    kept["2.bias"].zero_()  # a snapshot of before the step
    model(inputs(0))


def through_data(model):
    model.state_dict()["2.bias"].data.fill_(1.0)


def through_a_row(model):
    state = model.state_dict()
    state["2.bias"].data[1] = 1.0
    return state


def through_numpy(model):
    model.state_dict()["2.bias"].numpy()[2] = 1.0


@pytest.mark.parametrize("write", [through_data, through_a_row, through_numpy])
@pytest.mark.parametrize("tier", TIERS)
def test_a_write_that_nothing_counts_is_told(tier, write, tmp_path):
    model = sharded(tier, tmp_path)
    kept = write(model)
    with pytest.raises(RuntimeError, match=r"2\.bias was written in model\.state_dict\(\)"):
        model(inputs(0))
    kept = write(model)
    with pytest.raises(RuntimeError, match=r"2\.bias was written in model\.state_dict\(\)"):
        model.state_dict()  # or a script that converts a model would save what it was
    del kept
    model(inputs(0))
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())


def test_tensors_of_a_state_dict_go_when_they_are_dropped():
    """Also a write that is found only then counts, and what is only read never does."""
    model = sharded("host", None)
    state = model.state_dict()
    storages = [StorageWeakRef(value.untyped_storage()) for value in state.values()]
    model(inputs(0))
    torch.save(state, io.BytesIO())
    copied, pickled = copy.deepcopy(state), pickle.loads(pickle.dumps(state))
    assert all(type(value) is torch.Tensor for value in (*copied.values(), *pickled.values()))
    seeded(build).load_state_dict(state, assign=True)
    before = storage_uses(state["0.weight"])
    model(inputs(0))
    state["0.weight"].data.zero_()
    model(inputs(0))  # looked at before, and looked at again when it goes
    assert before is None or storage_uses(state["0.weight"]) <= before
    state.clear()
    assert all(storage.expired() for storage in storages)
    with pytest.raises(RuntimeError, match=r"0\.weight was written in model\.state_dict\(\)"):
        model(inputs(0))
    for _ in range(3):
        torch.save(model.state_dict(), io.BytesIO())
        assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
        model(inputs(0))


def test_memory_that_is_freed_under_a_tensor_is_not_looked_at():
    model = sharded("host", None)
    state = model.state_dict()
    for value in state.values():
        value.untyped_storage().resize_(0)
    model(inputs(0))
    del value
    state.clear()
    model(inputs(0))


def test_an_interrupt_while_a_state_dict_goes_is_raised(monkeypatch):
    model = sharded("host", None)
    state, summed = model.state_dict(), []

    def interrupted(_):
        if not summed:
            signal.raise_signal(signal.SIGINT)
        summed.append(0)
        return 0

    def drop():
        del state["0.weight"]
        threading.Event().wait(60.0)  # it comes a moment later, as a finaliser cannot raise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupts.install()
        monkeypatch.setattr(given_copies, "_sum", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(summed) == 1


def test_a_state_dict_of_a_script_goes_quietly_with_the_interpreter(monkeypatch):
    model, said = sharded("host", None), []
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    state = model.state_dict()
    monkeypatch.setattr(given_copies, "os", None)  # as modules are emptied
    state.clear()
    assert said == []


def test_keep_vars_gives_the_parameters():
    model = sharded("host", None)
    model(inputs(0)).square().mean().backward()
    found = model.state_dict(keep_vars=True)
    assert all(found[name] is param for name, param in model.named_parameters())
    assert all(value.grad is not None for value in found.values())


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.filterwarnings("error:.*optimizer.step")
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_what_is_done_to_a_wrapped_optimizer_counts(tier, tmp_path):
    """A scheduler that knew it before, options set by hand, states saved and loaded, and steps."""

    def run(model, wrap):
        inner = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        scheduler, seen = StepLR(inner, 1, 0.5), []
        inner.register_step_pre_hook(lambda *_: seen.append("step"))
        optimizer = wrap(inner)
        for _ in range(2):
            train(model, optimizer, 1)
            scheduler.step()
        saved = copy.deepcopy(inner.state_dict())
        train(model, inner, 1)
        inner.load_state_dict(saved)
        inner.param_groups[0]["momentum"] = 0.5
        train(model, optimizer, 2)
        return seen

    plain, model = seeded(build), sharded(tier, tmp_path)
    assert run(plain, lambda inner: inner) == run(model, unwall.wrap)
    for one, other in zip(values(plain), values(model), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_a_param_group_added_to_a_wrapped_optimizer():
    model = sharded("host", None)
    inner = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    optimizer = unwall.wrap(inner)
    inner.add_param_group({"params": model[0].parameters()})
    before = values(model)
    train(model, optimizer, 1)
    assert all(not torch.equal(one, other) for one, other in zip(before, values(model), strict=True))


def test_data_from_a_file_is_not_read_again_at_every_edge(monkeypatch, tmp_path):
    model = sharded("host", tmp_path)
    arrays = {name: torch.full(param.shape, 0.1).numpy() for name, param in model.named_parameters()}
    loaded = {name: torch.from_numpy(array) for name, array in arrays.items()}  # as what torch.load gives
    for name, param in model.named_parameters():
        param.data = loaded[name]
    model(inputs(0))
    summed = []
    monkeypatch.setattr(lent, "_sums", lambda tensor: summed.append(tensor))
    with torch.no_grad():
        model(inputs(0))
        assert not summed
        loaded["0.bias"].add_(1.0)  # what torch counts still reaches the parameter
        assert float(model[0].bias[0]) == pytest.approx(1.1)


def test_an_optimizer_may_be_loaded_before_what_state_dict_gave(tmp_path):
    model = sharded("host", tmp_path)
    optimizer = unwall.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    saved = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    for value in saved["model"].values():
        value.fill_(0.5)  # as torch.distributed.checkpoint.load does
    unwall.stats(model)
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    assert all(bool((value == 0.5).all()) for value in values(model))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9)])
def test_a_wrapped_optimizer_takes_what_a_plain_one_saved(kind, tmp_path):
    plain, model = seeded(build), sharded("host", tmp_path)
    before, optimizer = kind(plain.parameters(), lr=0.1), unwall.wrap(kind(model.parameters(), lr=0.1))
    train(plain, before, 3)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(before.state_dict())
    train(plain, before, 2)
    train(model, optimizer, 2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(values(model), values(plain), strict=True))


def test_values_that_are_kept_are_not_all_looked_at_with_each_read(monkeypatch):
    model = unwall.shard(nn.ParameterList([torch.full((2,), float(at)) for at in range(200)]), Plan(params="host"))
    looks, changed = [], lent.Lent.changed
    monkeypatch.setattr(lent.Lent, "changed", property(lambda lent: looks.append(lent) or changed.fget(lent)))
    kept = [param.data for param in model]
    kept[3].add_(1.0)
    for param, value in zip(model, [torch.full((2,), float(-at)) for at in range(200)], strict=True):
        param.data = value
    assert len(looks) < 400 * 25
    assert [float(param.detach()[0]) for param in model] == [float(-at) for at in range(200)]
    assert [float(value[0]) for value in kept] == [0.0, 1.0, 2.0, 4.0, *map(float, range(4, 200))]
