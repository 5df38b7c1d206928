"""Disk faults in the middle of training: a clear exception comes out of the loop, and the loop goes on to the same bits.

The loop is what a user would write: an exception of the disk means forget the gradients and run the batch again.
"""

import errno
import gc
import itertools
import os
import weakref
from dataclasses import replace

import pytest
import torch
from letting_go import gone
from offload import DISK, Setup, backward, build, differing, outcome, over_budget, start, step

import unwall
from unwall.native.disk import DiskEngine
from unwall.plans import Plan

STEPS = 2
PLACEMENTS = {
    "all-on-disk": DISK,
    "optimizer-on-disk": {"params": "host", "optimizer": "disk"},
    "params-and-grads-on-disk": {"params": "disk", "grads": "disk", "optimizer": "host"},
    "params-on-device": {"params": "device", "optimizer": "disk"},
}
SETUPS = {
    "bf16": Setup(),
    "fp32-clip-3": Setup(dtype=torch.float32, clip=0.5, passes=3),
    "fp16": Setup(dtype=torch.float16, passes=2),
}
FAULTS = {"read": errno.EIO, "write": errno.ENOSPC}


def disk_of(model):
    return unwall.api.engine(model).tiers.disk.engine


def insist(call, errors, times=5):
    """Calls until it works: looking at the model after a fault raises once, then the update is tried again."""
    for _ in range(times):
        try:
            return call()
        except OSError as error:
            errors.append(error)
    raise AssertionError(f"failed {times} times, the last time with: {errors[-1]}")


def train_through(model, optimizer, setup, steps=STEPS, first=0):
    """Trains, running each batch again when the disk fails. Gives the outcome and the exceptions."""
    errors = []
    for number in range(first, steps):
        for _ in range(5):
            try:
                step(model, optimizer, setup, number)
                break
            except OSError as error:
                errors.append(error)
                optimizer.zero_grad()
        else:
            raise AssertionError(f"step {number} failed 5 times, the last time with: {errors[-1]}")
    insist(lambda: unwall.stats(model), errors)
    return insist(lambda: outcome(model, optimizer), errors), errors


def unclear(error, op, folder):
    """What an exception of an injected fault fails to say."""
    text = str(error)
    missing = [] if error.errno == FAULTS[op] else [f"errno is {error.errno}"]
    missing += [] if error.filename and folder in str(error.filename) and str(error.filename) in text else ["no file"]
    missing += [] if os.strerror(FAULTS[op]) in text else ["no reason"]
    missing += [] if "group " in text else ["no group"]
    return [f"{reason}: {text}" for reason in missing]


def differences(op, setup, placement, folder, positions=None, every=1):
    """Trains once for each block of ``op`` that a run moves (or for each of ``positions``, or for the first of ``every`` few),
    with a fault at that block. What went wrong, by position."""
    expected, _ = train_through(*small(setup, placement, folder), setup)
    wrong, position, raised = [], 0, True
    left = itertools.count(step=every) if positions is None else iter(positions)
    for position in left:
        if positions is None and not raised:
            break
        model, optimizer = small(setup, placement, folder)
        disk_of(model).inject_fault(op, position, 1, FAULTS[op])
        got, errors = train_through(model, optimizer, setup)
        wrong += [f"block {position}, {errors[-1]}: {name}" for name in differing(expected, got)]
        wrong += [f"block {position}, {text}" for error in errors for text in unclear(error, op, folder)]
        wrong += [f"block {position}: over budget: {tier}" for tier in over_budget(model)]
        raised = bool(errors)
        unwall.api.engine(model).tiers.disk.close()  # its file, now: hundreds of runs follow
    assert position > 10  # the faults did hit the run
    return wrong


def small(setup, placement, folder):
    """Little enough that a fault can be tried at each of its blocks."""
    return start(replace(setup, blocks=2), {**placement, "disk_bytes": "8MiB"}, folder)


CASES = [("all-on-disk", name) for name in SETUPS] + [(name, "bf16") for name in PLACEMENTS if name != "all-on-disk"]


@pytest.mark.parametrize("op", FAULTS)
@pytest.mark.parametrize(("placement", "setup"), CASES)
def test_a_fault_at_some_block_is_raised_and_overcome(placement, setup, op, tmp_path):
    setup = replace(SETUPS[setup], speculate=False)  # a fault in an update ahead of its step is not raised
    assert differences(op, setup, PLACEMENTS[placement], str(tmp_path), every=4) == []


@pytest.mark.drill
@pytest.mark.parametrize("op", FAULTS)
@pytest.mark.parametrize(("placement", "setup"), CASES)
def test_a_fault_at_any_block_is_raised_and_overcome(placement, setup, op, tmp_path):
    setup = replace(SETUPS[setup], speculate=False)
    assert differences(op, setup, PLACEMENTS[placement], str(tmp_path)) == []


@pytest.mark.parametrize("op", FAULTS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_fault_beside_updates_ahead_of_the_step_is_overcome(placement, op, tmp_path):
    assert differences(op, Setup(), PLACEMENTS[placement], str(tmp_path), range(0, 150, 7)) == []


@pytest.mark.parametrize("op", FAULTS)
def test_a_fault_that_lasts_is_raised_each_time_and_overcome_once_it_is_gone(op, tmp_path):
    setup = Setup(clip=0.5)
    expected, _ = train_through(*start(setup, DISK, str(tmp_path)), setup, steps=3)
    model, optimizer = start(setup, DISK, str(tmp_path))
    step(model, optimizer, setup, 0)
    disk_of(model).inject_fault(op, 5, 1 << 30, FAULTS[op])
    for _ in range(4):
        with pytest.raises(OSError) as raised:  # noqa: PT012 - it may come out of any of these
            step(model, optimizer, setup, 1)
            unwall.stats(model)
        assert unclear(raised.value, op, str(tmp_path)) == []
        optimizer.zero_grad()
    disk_of(model).inject_fault(op, 0, 0, FAULTS[op])
    _, late = train_through(model, optimizer, setup, steps=2, first=1)
    assert len({str(error) for error in late}) == len(late)  # what had failed by then (a read, an update) may say so, once
    got, errors = train_through(model, optimizer, setup, steps=3, first=2)
    assert errors == []
    assert differing(expected, got) == []


def test_looking_at_the_model_after_a_failed_update_raises_until_it_works(tmp_path):
    setup = Setup()
    expected, _ = train_through(*start(setup, DISK, str(tmp_path)), setup, steps=1)
    model, optimizer = start(setup, DISK, str(tmp_path))
    backward(model, optimizer, setup, seed=0)
    unwall.stats(model)  # gradients are on disk
    disk_of(model).inject_fault("write", 0, 1 << 30, errno.ENOSPC)
    optimizer.step()  # the updates run behind it
    optimizer.zero_grad()
    looks = [lambda: unwall.stats(model), model.state_dict, optimizer.state_dict, lambda: unwall.full_params(model).__enter__()]
    for look in looks:
        with pytest.raises(OSError, match="No space left") as raised:
            look()
        assert unclear(raised.value, "write", str(tmp_path)) == []
    disk_of(model).inject_fault("write", 0, 0, errno.ENOSPC)
    assert differing(expected, outcome(model, optimizer)) == []


def test_a_fault_while_the_model_is_built_leaves_nothing_behind(tmp_path, monkeypatch):
    """``shard`` writes the initial values: what it raises there names the file, and the folder is empty again."""
    made = DiskEngine.__init__

    def failing(engine, *args, **kwargs):
        made(engine, *args, **kwargs)
        engine.inject_fault("write", 3, 1, errno.ENOSPC)

    monkeypatch.setattr(DiskEngine, "__init__", failing)
    with pytest.raises(OSError, match="No space left") as raised:
        unwall.shard(build(), Plan(**DISK, disk=tmp_path))
    assert unclear(raised.value, "write", str(tmp_path)) == []
    del raised
    assert gone(lambda: not list(tmp_path.iterdir()))


def test_a_model_that_met_a_fault_goes_with_its_file(tmp_path):
    setup = Setup()
    model, optimizer = start(setup, DISK, str(tmp_path))
    disk_of(model).inject_fault("read", 3, 1, errno.EIO)
    _, errors = train_through(model, optimizer, setup)
    assert len(errors) == 1
    del model, optimizer, errors
    assert gone(lambda: not list(tmp_path.iterdir()))  # the last updates may still run


@pytest.mark.parametrize("fate", ["kept", "dropped"])
def test_a_failed_update_of_one_model_does_not_touch_another(fate, tmp_path):
    setup = Setup(dtype=torch.float32)
    expected, _ = train_through(*small(setup, DISK, str(tmp_path)), setup)
    model, optimizer = small(setup, DISK, str(tmp_path))
    disk_of(model).inject_fault("write", 10, 1, errno.ENOSPC)  # gradients are five blocks
    step(model, optimizer, setup, 0)  # an update fails behind it, and nobody looks
    other = small(setup, DISK, str(tmp_path))
    if fate == "dropped":
        del model, optimizer
    got, errors = train_through(*other, setup)
    assert errors == []
    assert differing(expected, got) == []


def two_optimizers(placement, folder):
    """Of each group one has the weights, the other the rest."""
    model = build(blocks=4)
    unwall.shard(model, Plan(**placement, disk=folder))
    weights = [param for name, param in model.named_parameters() if name.endswith("linear.weight")]
    rest = [param for name, param in model.named_parameters() if not name.endswith("linear.weight")]
    return model, unwall.AdamW(weights, lr=1e-2), unwall.AdamW(rest, lr=3e-2)


@pytest.mark.parametrize("placement", ["all-on-disk", "optimizer-on-disk"])
@pytest.mark.parametrize("op", FAULTS)
def test_a_step_that_raises_has_changed_nothing_of_two_optimizers_on_the_same_groups(op, placement, tmp_path):
    results = []
    for fields in ({"params": "device", "optimizer": "device"}, PLACEMENTS[placement]):
        model, first, second = two_optimizers(fields, str(tmp_path))
        faulty = fields is PLACEMENTS[placement]
        for number in range(3):
            backward(model, first, Setup(), seed=number)
            if faulty:
                unwall.stats(model)  # gradients are on disk
                disk_of(model).inject_fault(op, 0, 1 << 30, FAULTS[op])
            first.step()  # its updates fail behind it
            if faulty:
                with pytest.raises(OSError, match=os.strerror(FAULTS[op])):
                    second.step()
                disk_of(model).inject_fault(op, 0, 0, FAULTS[op])
            second.step()
        results.append({**outcome(model, first), **{f"second.{name}": v for name, v in outcome(model, second).items()}})
    assert differing(*results) == []


def test_an_optimizer_goes_at_once_after_the_disk_failed_another(tmp_path):
    setup = Setup(clip=1e-3)
    model, optimizer = small(setup, DISK, str(tmp_path))
    backward(model, optimizer, setup, seed=0)
    unwall.stats(model)
    disk_of(model).inject_fault("write", 0, 1 << 30, errno.ENOSPC)
    optimizer.step()
    del optimizer
    other, fine = small(setup, DISK, str(tmp_path))  # tries to free what is left
    disk_of(model).inject_fault("write", 0, 0, errno.ENOSPC)
    step(other, fine, setup, 0)  # frees it
    kept = weakref.ref(fine)
    gc.disable()
    try:
        del fine
        assert gone(lambda: kept() is None, collect=False)
    finally:
        gc.enable()


def test_what_one_model_could_not_write_does_not_fail_another(tmp_path):
    setup = Setup()
    model, optimizer = small(setup, DISK, str(tmp_path))
    step(model, optimizer, setup, 0)
    model.load_state_dict(model.state_dict())
    disk_of(model).inject_fault("write", 0, 1 << 30, errno.ENOSPC)  # the last group that was loaded is not written yet
    del optimizer
    other, fine = small(setup, DISK, str(tmp_path))
    step(other, fine, setup, 0)
    assert unwall.stats(other).tiers["disk"].live_bytes > 0
    disk_of(model).inject_fault("write", 0, 0, errno.ENOSPC)
    left = unwall.stats(model).tiers["disk"].live_bytes
    assert left < unwall.stats(other).tiers["disk"].live_bytes / 2  # moments and gradients are gone
