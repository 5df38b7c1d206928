"""The engine on an accelerator. Run on a GPU machine: ``PYTHONPATH=src python3 -m pytest tests/runtime/test_gpu.py -m gpu``."""

import copy
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.optim.journaled import FIRST_STEP
from unwall.optim.measure import measure, norm_at_once
from unwall.optim.norm import norm_of
from unwall.optim.updates import drain
from unwall.plans import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]

WIDTH = 256


class Net(nn.Module):
    """A tied head, a frozen part, norms, a block that is recomputed: what the engine has to follow on streams."""

    def __init__(self, frozen=False, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(500, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        if frozen:
            self.blocks[1].requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return F.linear(x, self.embed.weight).float()


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 500, (4, 33), generator=generator).cuda() for _ in range(steps)]


def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def plain_mixed(model, rows, dtype, clip, steps):
    """bf16 or fp16 copy for forward and backward, fp32 master, AdamW."""
    master = model
    work = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3)
    losses = []
    for batch in rows[:steps]:
        loss = loss_of(work, batch)
        loss.backward()
        for into, param in zip(master.parameters(), work.parameters(), strict=True):
            into.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        if clip:
            nn.utils.clip_grad_norm_(master.parameters(), clip)
        optimizer.step()
        with torch.no_grad():
            for param, source in zip(work.parameters(), master.parameters(), strict=True):
                param.copy_(source)
        losses.append(loss.item())
    return losses, master.state_dict()


def ours(model, rows, plan, clip, steps):
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3, max_grad_norm=clip)
    losses = []
    for batch in rows[:steps]:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def distance(a, b):
    top = sum((a[key].cpu().double() - b[key].cpu().double()).square().sum() for key in b)
    return (top / sum(b[key].cpu().double().square().sum() for key in b)).sqrt().item()


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(("frozen", "recompute"), [(False, False), (True, True)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3)], ids=["fp32", "bf16"])
def test_parity(dtype, limit, frozen, recompute, clip):
    torch.manual_seed(0)
    plain = Net(frozen, recompute).cuda()
    sharded = copy.deepcopy(plain).cpu()  # the engine moves it to the accelerator itself
    rows = batches(10)
    expected, state = plain_mixed(plain, rows, dtype, clip, 10)
    losses, got = ours(sharded, rows, Plan(compute_dtype=dtype), clip, 10)
    assert next(sharded.parameters()).is_cuda
    assert losses == pytest.approx(expected, rel=1e-5 if dtype is torch.float32 else 2e-3)
    assert distance(got, state) < limit


def test_fp16_overflow_skips_the_step():
    torch.manual_seed(0)
    model = Net()
    unwall.shard(model, Plan(compute_dtype=torch.float16))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    before = model.state_dict()
    optimizer.scaler.scale = 2.0**40
    optimizer.scale(loss_of(model, batches(1)[0])).backward()
    optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert optimizer.scaler.scale == 2.0**39


def test_the_device_kernel_is_the_host_kernel():
    """One update of random states, split master and not, against the native kernel."""
    from unwall.native.pool import AdamWStep
    from unwall.optim.adamw_rule import adamw
    from unwall.optim.rule import Span
    from unwall.shards.master import join, split

    generator = torch.Generator().manual_seed(0)
    n = 100_003
    values, grad = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    step = AdamWStep(lr=1e-2, weight_decay=0.1, grad_scale=0.5, step=3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results = []
        for device in ("cpu", "cuda"):
            moments = {
                name: torch.randn(n, generator=torch.Generator().manual_seed(7)).abs().to(device)
                for name in ("exp_avg", "exp_avg_sq")
            }
            if dtype is torch.bfloat16:
                half, rest = (part.to(device) for part in split(values))
                span = Span(half, grad.to(device, dtype), moments, step, remainder=rest)
            elif dtype is torch.float16:
                master = values.to(device, copy=True)
                span = Span(values.to(device, dtype), grad.to(device, dtype), moments, step, master=master)
            else:
                span = Span(values.to(device, copy=True), grad.to(device), moments, step)
            ticket = adamw(span, step)
            if ticket is not None:
                ticket.wait()
            master = span.master if span.master is not None else span.param
            results.append((join(half, rest) if dtype is torch.bfloat16 else master).cpu())
        assert torch.allclose(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_wrap_and_init():
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    with unwall.init():
        model = Net()
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    plain.cuda()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in batches(5):
        for net, stepper in ((plain, reference), (model, optimizer)):
            loss_of(net, batch).backward()
            stepper.step()
            stepper.zero_grad()
    assert distance(model.state_dict(), plain.state_dict()) < 1e-5


class Tower(nn.Module):
    """Nothing in it adds in an order that changes from run to run, so bits can be compared."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def train_tower(plan, clip=None, passes=1, scale=1.0, **options):
    torch.manual_seed(0)
    model = Tower()
    unwall.shard(model, Plan(**plan))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3, max_grad_norm=clip, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        for _ in range(passes):
            x = torch.randn(64, WIDTH, generator=generator).cuda()
            (model(x).float().square().mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"]
    moments = {f"{number}.{name}": value for number, entry in states.items() for name, value in entry.items()}
    return {**model.state_dict(), **moments}, unwall.stats(model)


@pytest.mark.parametrize(("clip", "passes"), [(None, 1), (0.05, 1), (1e6, 1), (0.05, 3)])
def test_host_and_disk_placements_give_the_same_bits(clip, passes, tmp_path, monkeypatch):
    from unwall.optim import policy

    monkeypatch.setattr(policy, "CLIP_MEMORY", 2)
    host = {"params": "host", "optimizer": "host"}
    disk = {"params": "disk", "optimizer": "disk", "disk": tmp_path}
    expected, _ = train_tower({**host, "host_bytes": "1GiB"}, clip, passes)
    plans = [
        {**host, "device_bytes": "8MiB"},
        disk,
        {**disk, "params": "host"},
        {**disk, "params": "device"},
        {**disk, "grads": "disk"},
        {**disk, "device_bytes": "8MiB"},
    ]
    for plan in plans:
        got, stats = train_tower(plan, clip, passes)
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == [], plan
        for tier in stats.tiers.values():
            assert tier.budget_bytes is None or tier.peak_bytes <= tier.budget_bytes
    if clip is None and passes == 1:
        for plan in (host, disk):
            got, _ = train_tower(plan, update_in_backward=True)
            assert all(torch.equal(expected[name], got[name]) for name in expected), plan


def test_updates_ahead_of_the_step_are_committed_on_an_accelerator(monkeypatch):
    from unwall.optim import policy

    host = {"params": "host", "optimizer": "host"}
    expected, _ = train_tower(host)
    monkeypatch.setattr(policy, "CLIP_MEMORY", 2)
    got, stats = train_tower(host, clip=1e6)
    assert stats.speculated.committed > 0
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_an_update_with_a_way_back_waits_for_its_gradient_and_for_no_later_compute():
    """Block 2 and what follows it have their gradients while the device is still at work before block 1."""
    host = {"params": "host", "optimizer": "host"}
    _, stats = train_tower(host, clip=1e6, speculate=False)
    numel = sum(param.numel() for param in Tower().parameters())
    torch.manual_seed(0)
    model = Tower()
    unwall.shard(model, Plan(**host, host_bytes=stats.tiers["host"].live_bytes + int(2.13 * numel) + 20_000))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1e6)
    generator = torch.Generator().manual_seed(1)
    seen = []

    def sleep(_):
        begun = optimizer.ahead.ready + optimizer.ahead.under_way
        torch.cuda._sleep(int(8e9))  # four seconds or more
        slept = torch.cuda.Event()
        slept.record()

        def look():  # backward itself may wait for the device
            while optimizer.ahead.ready < begun and not slept.query():
                time.sleep(0.001)
            seen.append((begun, slept.query()))

        looker.append(threading.Thread(target=look))
        looker[0].start()

    looker = []
    for step in range(FIRST_STEP + 12):
        last = step == FIRST_STEP + 11
        if last:
            handle = model.blocks[1].register_forward_hook(lambda _, __, y: y.register_hook(sleep) and None)
        y = model(torch.randn(64, WIDTH, generator=generator).cuda())
        if last:
            handle.remove()
        y.float().square().mean().backward()
        drain()
        if last:
            looker[0].join()
        optimizer.step()
        optimizer.zero_grad()
    [(begun, had_gone_on)] = seen
    assert begun >= 4
    assert not had_gone_on, "the updates of what had its gradient ended while the device was still asleep"
    assert unwall.stats(model).speculated.in_place > 0


def test_a_profile_has_device_lanes(tmp_path):
    model = Tower()
    unwall.shard(model, Plan(params="host", optimizer="disk", disk=tmp_path))
    optimizer = unwall.AdamW(model.parameters())
    with unwall.profile(model) as profile:
        for _ in range(2):
            model(torch.randn(64, WIDTH).cuda()).float().square().mean().backward()
            optimizer.step()
    lanes = {span.lane for span in profile.spans}
    assert {"compute", "host>device", "device>host", "update", "disk>host", "host>disk"} <= lanes
    assert all(span.start <= span.end for span in profile.spans)


def test_lending_parameters_needs_memory_for_them_and_not_for_their_group():
    torch.cuda.empty_cache()
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    sharded = unwall.shard(nn.ModuleList([model]), Plan(params="device", optimizer="device"))
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with unwall.full_params(model[3], write=True), torch.no_grad():
        model[3].weight.fill_(2.0)
    lent = 4 * 2048 * 2048
    extra = torch.cuda.max_memory_allocated() - held
    assert extra <= 3 * lent + 100e6, f"{extra / lent:.1f} times what was lent"  # 100 MB: the pieces' temporaries
    assert (sharded[0][3].weight.float() == 2.0).all()


def test_gradients_that_have_left_do_not_stay_on_the_device():
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
    unwall.shard(model, Plan(params="host", optimizer="host", device_bytes="64MiB"))
    optimizer = unwall.AdamW(model.parameters(), max_grad_norm=1e-3)
    inputs = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)
    for step in range(3):
        if step == 2:
            unwall.stats(model)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - unwall.stats(model).tiers["device"].live_bytes
            torch.cuda.reset_peak_memory_stats()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    beyond = torch.cuda.max_memory_allocated() - held - (64 << 20)
    weight = 2 * 2048 * 2048
    assert beyond <= 4 * weight, f"{beyond / weight:.1f} gradients beyond the budget"  # autograd's own, and activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_one_tensor_has_the_bits_of_the_long_way(dtype):
    model = unwall.shard(nn.Linear(WIDTH, WIDTH).cuda(), Plan(compute_dtype=dtype))
    optimizer = unwall.AdamW(model.parameters(), max_grad_norm=1.0)
    for step in range(4):
        model(torch.randn(4, WIDTH, device="cuda") * 10.0 ** (step - 2)).float().square().mean().backward()
        held = optimizer.before.held(optimizer.engines())
        at_once = norm_at_once(optimizer.engines(), held)
        assert at_once is not None
        assert torch.equal(at_once, norm_of(measure(optimizer.engines(), held, 2.0, False), 2.0).float())
        optimizer.step()
        optimizer.zero_grad()
