"""What module calls cost: the same amount of work for each of them however many there are, and none where nothing moves."""

import argparse
import gc
import sys
from pathlib import Path

import pytest
import torch
from bench.overhead import Layer, calls_of, rows
from torch import nn

import unwall

WIDTH = 8


def adapters(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, 2) for _ in range(layers)))


def sharded(model, tier="device", **plan):
    tiers = {} if tier == "device" else {"params": tier, "optimizer": tier}
    unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, **tiers, **plan))
    return unwall.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def step(model, optimizer, passes=1):
    batches = [torch.full((2, WIDTH), 0.1 * at + 0.1) for at in range(passes)]
    losses = [model(batch).square().mean() for batch in batches]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item() for loss in losses]


def work_of_a_step(layers, tier, **plan):
    """Calls of functions of unwall's in a step, once everything is learned and no update is under way. What other tests have
    left is not collected meanwhile."""
    model = adapters(layers)
    optimizer = sharded(model, tier, **plan)
    for _ in range(3):
        step(model, optimizer)
    unwall.api.engine(model).finish()
    count, ours = 0, str(Path(unwall.__file__).parent)

    def called(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(ours)

    gc.collect()
    gc.disable()
    sys.setprofile(called)
    try:
        step(model, optimizer)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("tier", ["device", "host"])
def test_the_work_for_a_module_does_not_grow_with_their_number(tier):
    budgets = [{}, {}] if tier == "device" else [{"device_bytes": size << 10, "host_bytes": 64 << 20} for size in (64, 128)]
    few, many = work_of_a_step(16, tier, **budgets[0]), work_of_a_step(32, tier, **budgets[1])
    assert many <= 2.25 * few


def test_few_python_functions_are_called_for_each_module():
    """Beyond those of plain PyTorch, in forward, backward and step together: 6.4 where everything stays and 27.8 where groups
    come and go. They were 16.4 and 49.1."""
    plain, resident, moving = rows(argparse.Namespace(layers=80, width=16, rank=2, share=0.5, only=None))
    for row in (plain, resident, moving):
        for _ in range(4):
            row.step()
    calls = [row.python_calls() / calls_of(plain.model) for row in (plain, resident, moving)]
    assert calls[1] - calls[0] < 10
    assert calls[2] - calls[0] < 34


def test_nothing_is_done_for_modules_inside_where_every_group_stays():
    model = adapters(6)
    optimizer = sharded(model)
    step(model, optimizer)
    called = []
    executor = unwall.api.engine(model).executor
    for name in ("use", "pin", "release", "use_staying"):
        method = getattr(executor, name)
        setattr(executor, name, lambda *args, name=name, method=method: (called.append(name), method(*args))[1])
    step(model, optimizer)
    assert called == ["use_staying"] * len(executor.groups)  # when the pass begins
    assert executor.trace.position == 0


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("passes", [1, 2])
def test_steps_are_those_of_plain_pytorch(tier, passes):
    plain = adapters(3)
    reference = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], lr=1e-2)
    model = adapters(3)
    optimizer = sharded(model, tier)
    for _ in range(4):
        torch.testing.assert_close(step(model, optimizer, passes), step(plain, reference, passes))


def test_gradients_of_a_second_backward_are_reduced_while_it_runs():
    """Two forwards come first: the groups' sums of the second backward must not all wait for its end."""
    model = adapters(6)
    sharded(model)
    engine = unwall.api.engine(model)
    losses = [model(torch.full((2, WIDTH), value)).square().mean() for value in (0.1, 0.2)]
    losses[0].backward()
    reduced, reduce = [], engine.executor.reduce
    at_end, end = [], engine.backward._end
    engine.executor.reduce = lambda index, *args: (reduced.append(index), reduce(index, *args))[1]
    engine.backward._end = lambda: (at_end.append(len(reduced)), end())[1]
    losses[1].backward()
    trained = {index for index, group in enumerate(engine.groups) if any(param.requires_grad for param in group.params)}
    assert at_end == [len(trained)]
    assert sorted(reduced) == sorted(trained)


def test_a_submodule_called_alone_is_a_pass_of_its_own():
    model = adapters(2)
    sharded(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    plain = adapters(2)
    torch.testing.assert_close(model[1](torch.ones(2, WIDTH)), plain[1](torch.ones(2, WIDTH)))
    with pytest.raises(TypeError):
        model(None)  # a forward that fails leaves nothing behind
    torch.testing.assert_close(model[0](torch.ones(2, WIDTH)), plain[0](torch.ones(2, WIDTH)))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_hooks_of_the_user_are_called_inside_too(tier):
    """Calls inside skip the walk through hooks where there are none but ours: those that come later, or are for all modules,
    are called, once each."""
    model, called = adapters(2), []
    optimizer = sharded(model, tier)
    inner = model[1].parts[2]
    step(model, optimizer)
    handles = [
        inner.register_forward_pre_hook(lambda *_: called.append("before")),
        inner.up.register_forward_hook(lambda module, args, output: (called.append("after"), 2 * output)[1]),
        inner.down.register_full_backward_hook(lambda *_: called.append("backward")),
    ]
    step(model, optimizer)
    assert called == ["before", "after", "backward"]
    for handle in handles:
        handle.remove()
    with nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module)):
        step(model, optimizer)
    assert called[3:].count(inner.base) == 1
    step(model, optimizer)
    assert len(called) == 3 + sum(not isinstance(module, nn.ModuleList) for module in model.modules())


class Doubles(nn.Identity):
    def _call_impl(self, *args, **kwargs):
        return 2 * super()._call_impl(*args, **kwargs)


def test_a_module_with_a_call_of_its_own_is_called_that_way():
    plain, model = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Doubles(), nn.Identity())) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for each in (plain, model):
        each[1][1].__dict__["_call_impl"] = torch.neg
    sharded(model)
    assert torch.equal(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))


def test_inside_no_hook_of_ours_is_called_for_each_module():
    model = adapters(4)
    optimizer = sharded(model)
    for _ in range(2):
        step(model, optimizer)
    walked = 0

    def called(frame, event, _):
        nonlocal walked
        walked += event == "call" and type(frame.f_locals.get("self")).__name__ in ("Enter", "Leave")

    sys.setprofile(called)
    try:
        step(model, optimizer)
    finally:
        sys.setprofile(None)
    assert walked == 2  # of the outermost module alone
