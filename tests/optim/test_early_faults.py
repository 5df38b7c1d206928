"""Updates ahead of ``step`` when something fails, stops or goes away."""

import errno
import gc
import shutil

import pytest
import torch
from early_tools import DEVICE, backward, on_disk, outcome, same, start, steps, wait_until
from torch import nn

import unwall
from unwall.optim.updates import drain
from unwall.plans import Plan


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_drive_that_fails_ahead_of_the_step_costs_the_speculation_only(operation, tmp_path):
    committed = []

    def scenario(model, optimizer):
        steps(model, optimizer, 4)
        tiers = unwall.api.engine(model).tiers
        committed.append(unwall.stats(model).speculated.committed)
        if tiers.disk is not None:
            tiers.disk.engine.inject_fault(operation, 1, 10**6, errno.EIO)
        backward(model, 10)  # nothing but updates ahead of the step uses the drive now
        drain()
        if tiers.disk is not None:
            tiers.disk.engine.inject_fault(operation, 0, 0, errno.EIO)
            assert tiers.chunks.in_use == 0
            assert optimizer.ahead.failed > 0
        optimizer.step()
        committed.append(unwall.stats(model).speculated.committed)
        optimizer.zero_grad()
        steps(model, optimizer, 3, first=20)

    stats = same(scenario, {"params": "host", "optimizer": "disk", "disk": tmp_path})
    before, after = committed[-2:]
    assert 0 < before == after < stats.speculated.committed


def test_an_update_through_the_disk_stops_when_it_is_not_wanted_any_more(tmp_path):
    model = nn.Sequential(
        *(nn.Linear(256, 256, bias=False) for _ in range(4))
    )  # groups of 16 chunks: six are under way at once
    unwall.shard(model, Plan(params="host", optimizer="disk", disk=tmp_path))
    optimizer = unwall.AdamW(model.parameters())
    tiers = unwall.api.engine(model).tiers
    written = []
    for _ in range(3):
        model(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        written.append(unwall.stats(model).links["host>disk"].moved_bytes)
    tiers.disk.engine.throttle("read", 1)  # no chunk comes before it is let go
    model(torch.randn(4, 256)).square().mean().backward()
    wait_until(tiers.chunks.full)
    optimizer.zero_grad()
    tiers.disk.engine.throttle("read", 0)
    drain()
    extra = unwall.stats(model).links["host>disk"].moved_bytes - written[-1]
    assert 0 < extra < (written[-1] - written[-2]) / 4 * 0.6


class Branches(nn.Module):
    """Uses the layers that it is told to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(192, 192, bias=False) for name in "abcd"})

    def forward(self, x, use):
        for name in use:
            x = torch.tanh(self.layers[name](x))
        return x


def branching(plan, fault):
    """b's commit falls behind the failed update of a; c is speculated on before b's commit is tried again."""
    torch.manual_seed(0)
    model = Branches()
    unwall.shard(model, Plan(compute_dtype=torch.bfloat16, **plan))
    apart = [param for name, param in model.named_parameters() if ".a." in name]
    others = [param for name, param in model.named_parameters() if ".a." not in name]
    optimizer = unwall.AdamW([{"params": apart}, {"params": others}], lr=1e-2)
    engine = unwall.api.engine(model)

    def run(seed, use):
        torch.manual_seed(seed)
        model(torch.randn(8, 192), use).float().square().mean().backward()
        drain()

    for seed in range(4):
        run(seed, "dabc")
        optimizer.step()
        optimizer.zero_grad()
    run(10, "dab")
    optimizer.param_groups[0]["lr"] = 5e-3  # so that a is updated in place, whatever was computed ahead
    if fault:
        assert optimizer.ahead.ready > 0  # b is committed
        engine.tiers.disk.engine.inject_fault("write", 0, 1, errno.EIO)
    optimizer.step()
    drain()
    if fault:
        engine.tiers.disk.engine.inject_fault("write", 0, 0, errno.EIO)
    optimizer.zero_grad()
    for _ in range(3):
        try:
            run(11, "dac")
            break
        except OSError:
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    return outcome(model, optimizer)


def test_a_shadow_is_not_used_again_before_its_commit_came_through(tmp_path):
    expected = branching(DEVICE, fault=False)
    got = branching({"params": "host", "optimizer": "disk", "disk": tmp_path}, fault=True)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_model_dropped_between_backward_and_step_leaves_no_file(tmp_path, forgotten):
    model, optimizer = start(on_disk(tmp_path))
    steps(model, optimizer, 3)
    backward(model, 10)
    if forgotten:
        optimizer.zero_grad()
    del model, optimizer

    def gone():
        gc.collect()
        return not list(tmp_path.iterdir())

    wait_until(gone)


def test_a_folder_that_is_removed_while_training_does_no_harm(tmp_path):
    folder = tmp_path / "tier"
    folder.mkdir()

    def scenario(model, optimizer):
        steps(model, optimizer, 1)  # nothing was speculated yet
        if unwall.api.engine(model).tiers.disk is not None:
            shutil.rmtree(folder)
        steps(model, optimizer, 3, first=5)

    same(scenario, on_disk(folder))


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_an_optimizer_dropped_after_its_update_failed_leaves_a_usable_model(tmp_path, clip):
    """Without clipping, what was computed ahead is committed behind the failed update, when the optimizer is long gone."""

    def scenario(model, optimizers):
        steps(model, optimizers[0], 4)
        backward(model, 10)
        drain()
        tiers = unwall.api.engine(model).tiers
        committed = unwall.stats(model).speculated.committed
        if tiers.disk is not None:
            tiers.disk.engine.inject_fault("write", 0, 10**6, errno.EIO)
        optimizers[0].step()
        drain()
        optimizers.clear()
        gc.collect()
        if tiers.disk is not None:
            with pytest.raises(OSError, match="Input/output error"):
                unwall.stats(model)
            tiers.disk.engine.inject_fault("write", 0, 0, errno.EIO)
            assert (unwall.stats(model).speculated.committed > committed) == (clip is None)
        return model.state_dict()

    results = []
    for plan in (DEVICE, {"params": "host", "optimizer": "disk", "disk": tmp_path}):
        model, *optimizers = start(plan, max_grad_norm=clip)
        results.append(scenario(model, optimizers))
        assert not optimizers
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
