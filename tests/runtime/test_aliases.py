"""Tensors that share memory with a parameter and outlive its stay on the device keep their values; nothing crashes."""

import gc
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import unwall
from unwall.plans import Plan
from unwall.shards import flat
from unwall.shards.flat import FlatBuffer

WIDTH = 64
KEEP = {
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "view": lambda weight: weight.data[3:9].t(),
    "numpy": lambda weight: weight.detach().numpy(),
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])


def iterate(model, optimizer, seed):
    torch.manual_seed(seed)
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def start(place, folder, tight):
    budget = {"device_bytes": 8 * 4 * (WIDTH * WIDTH + WIDTH)} if tight else {}
    model = build()
    unwall.shard(model, Plan(params=place, optimizer=place, compute_dtype=torch.float32, disk=folder, **budget))
    return model, unwall.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("tight", [False, True], ids=["room", "tight"])
@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("keep", KEEP)
def test_what_is_kept_in_a_hook_stays_as_it_was(keep, place, tight, tmp_path):
    plain, plain_optimizer = start("device", tmp_path, tight=False)
    model, optimizer = start(place, tmp_path, tight)
    kept, copies = [], []

    def hook(module, inputs, output):
        kept.append(KEEP[keep](module.weight))
        copies.append(torch.as_tensor(kept[-1]).clone())

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        handle = model[1].register_forward_hook(hook)
        losses = [iterate(model, optimizer, seed) for seed in range(3)]
        handle.remove()
        losses += [iterate(model, optimizer, seed) for seed in range(3, 5)]
    assert losses == [iterate(plain, plain_optimizer, seed) for seed in range(5)]
    for alias, copy in zip(kept, copies, strict=True):
        assert torch.equal(torch.as_tensor(alias), copy)
    told = [str(entry.message) for entry in said if "shares memory" in str(entry.message)]
    assert len(told) == 1  # for that group, not at each drop
    assert "clone()" in told[0]


HOOKS = {
    "tensor": lambda tensor, seen: seen.append(tensor) or tensor,
    "tuple": lambda tensor, seen: seen.append(tensor) or (tensor,),
    "shared tuple": lambda tensor, seen: seen.append((tensor,)) or seen[-1],
    "closure": lambda tensor, seen: seen.append(lambda: tensor) or (lambda: tensor),
    "detached": lambda tensor, seen: seen.append(tensor.detach()) or seen[-1],
}


def opened(packed):
    packed = packed() if callable(packed) else packed
    return packed[0] if isinstance(packed, tuple) else packed


@pytest.mark.parametrize("hooks", HOOKS)
def test_what_hooks_on_saved_tensors_keep_beside_it_stays_as_it_was(hooks, tmp_path):
    """Also while the graph lives: what the hooks gave back is the very tensor that they keep."""
    model, optimizer = start("host", tmp_path, tight=True)
    seen, copies = [], []

    def pack(tensor):
        packed = HOOKS[hooks](tensor, seen)
        if len(copies) < len(seen):
            copies.append(tensor.detach().clone())
        return packed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with saved_tensors_hooks(pack, opened):
            loss = model(torch.randn(4, WIDTH)).square().mean()
        with torch.no_grad():
            model(torch.randn(4, WIDTH))  # every group comes and goes
        assert all(torch.equal(opened(kept), copy) for kept, copy in zip(seen, copies, strict=True))
        loss.backward()
        optimizer.step()
    assert all(torch.equal(opened(kept), copy) for kept, copy in zip(seen, copies, strict=True))


def test_a_parameter_that_hooks_give_back_hides_no_alias(tmp_path):
    """What holds the parameter itself holds none of its memory."""
    model = nn.Sequential(*[nn.LayerNorm(WIDTH) for _ in range(8)])
    unwall.shard(model, Plan(params="host", optimizer="host", compute_dtype=torch.float32, device_bytes=1 << 16))
    kept = []
    model[0].register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            loss = model(torch.randn(4, WIDTH)).sum()
        unwall.api.engine(model).executor.drop_cache()
        assert torch.equal(kept[0], torch.ones(WIDTH))
        loss.backward()


@pytest.mark.filterwarnings("error:.*shares memory")
@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: saved_tensors_hooks(lambda tensor: lambda: tensor, lambda get: get())])
def test_hooks_that_keep_what_they_are_given_until_backward_say_nothing(hooks, tmp_path):
    """The graph holds it, and backward alone reads it: the memory comes and goes as without hooks."""
    plain, plain_optimizer = start("device", tmp_path, tight=False)
    model, optimizer = start("host", tmp_path, tight=True)
    for seed in range(3):
        with hooks():
            expected = iterate(plain, plain_optimizer, seed)
            assert iterate(model, optimizer, seed) == expected
    assert unwall.stats(model).tiers["device"].peak_bytes <= unwall.stats(model).tiers["device"].budget_bytes


def test_writing_to_what_was_kept_is_told_and_harms_nobody(tmp_path):
    plain, plain_optimizer = start("device", tmp_path, tight=False)
    model, optimizer = start("host", tmp_path, tight=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        out = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)))
        kept = [layer.weight.data for layer in model]
        out.square().mean().backward()
        optimizer.zero_grad()
        for seed in range(3):
            expected = iterate(plain, plain_optimizer, seed)
            assert iterate(model, optimizer, seed) == expected
            for alias in kept:
                alias.fill_(123.0)
            with pytest.raises(RuntimeError, match="was written"):
                model.state_dict()


def test_nothing_is_said_where_nothing_is_kept(tmp_path):
    model, optimizer = start("host", tmp_path, tight=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for seed in range(3):
            iterate(model, optimizer, seed)
        model(torch.randn(2, WIDTH))  # a graph that is abandoned
        iterate(model, optimizer, 3)
    assert unwall.stats(model).tiers["device"].live_bytes <= unwall.stats(model).tiers["device"].budget_bytes


@pytest.mark.filterwarnings("error:.*shares memory")
def test_garbage_in_cycles_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(FlatBuffer, "in_vain", 0)
    model, optimizer = start("host", tmp_path, tight=True)

    def hook(module, *_):
        frame = {"weight": module.weight.detach()}
        frame["itself"] = frame

    gc.disable()
    try:
        for layer in (model[1], model[5]):
            layer.register_forward_hook(hook)
        for seed in range(2):
            iterate(model, optimizer, seed)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("error:.*shares memory")
def test_a_thread_of_gloo_may_let_go_late(tmp_path, monkeypatch):
    """It does not run for seconds, on a machine that does other things."""
    model, optimizer = start("host", tmp_path, tight=True)
    clock, slept = itertools.count(step=60), []
    group = unwall.api.engine(model).groups[2]
    kept = []

    def keep(module, *_):
        kept.append(module.weight.detach())
        group.buffer._gathered = True

    def sleep(_):
        slept.append(0)
        if len(slept) % 3 == 0:
            kept.clear()

    handle = model[2].register_forward_hook(keep)
    monkeypatch.setattr(flat, "time", SimpleNamespace(monotonic=clock.__next__, sleep=sleep))
    monkeypatch.setattr(FlatBuffer, "in_vain", flat.COLLECTIONS)
    iterate(model, optimizer, 0)
    handle.remove()
    assert slept


def test_memory_left_to_someone_comes_back_when_it_is_dropped(tmp_path):
    """What the account shows is what the engine holds; the rest is the user's."""
    model, optimizer = start("host", tmp_path, tight=True)
    kept = []
    handle = model[2].register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for seed in range(3):
            iterate(model, optimizer, seed)
    handle.remove()
    stats = unwall.stats(model).tiers["device"]
    assert stats.peak_bytes <= stats.budget_bytes
    kept.clear()
    iterate(model, optimizer, 3)
