"""Activations on a real accelerator: the values of keeping them, and less memory."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import unwall
from unwall.nn import linear_cross_entropy
from unwall.runtime import saved_on_host
from unwall.schedule.observed import Observed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]
WIDTH = 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 5000, bias=False)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return linear_cross_entropy(x, self.head.weight, labels, chunk_tokens=512)


def trained(activations, tier, compiled=False):
    gc.collect()  # the model before
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = Net()
    if compiled:
        for block in model.blocks:
            block.compile()
    small = {} if tier == "device" else {"device_bytes": "120MiB"}
    unwall.shard(model, unwall.Plan(params=tier, optimizer=tier, activations=activations, **small))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    x, labels = torch.randn(4, 1024, WIDTH, device="cuda"), torch.randint(0, 5000, (4, 1024), device="cuda")
    losses = []
    for step in range(5):
        if step == 4:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = model(x, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("in_flight", [32 << 20, 1 << 30])
def test_the_losses_of_keep_with_less_memory(tier, in_flight, monkeypatch):
    monkeypatch.setattr(saved_on_host, "IN_FLIGHT_BYTES", in_flight)
    monkeypatch.setattr(saved_on_host, "AHEAD_BYTES", in_flight)
    losses, kept_bytes = trained("keep", tier)
    for activations in ("recompute", "host"):
        found, peak_bytes = trained(activations, tier)
        assert found == losses
        assert peak_bytes < kept_bytes - (100 << 20)


@pytest.mark.parametrize("activations", ["keep", "recompute", "host"])
def test_compiled_blocks(activations):
    losses, _ = trained(activations, "device", compiled=True)
    plain, _ = trained("keep", "device")
    assert losses[0] == pytest.approx(plain[0], rel=2e-2)  # dropout draws other numbers in a compiled block
    assert losses[-1] < losses[0]


# -- auto -------------------------------------------------------------------------------------------------------------


def small_model(budget, compiled=False, steps=6, hidden=True, **options):
    """Losses, the peak beyond what was there before, and who decided."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks if compiled else ():
        block.compile()
    unwall.shard(model, unwall.Plan(params="host", optimizer="host", device_bytes=budget, **options))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    x, labels = torch.randn(4, 1024, WIDTH, device="cuda"), torch.randint(0, 5000, (4, 1024), device="cuda")
    given = torch.cuda.memory_allocated()
    losses = []
    for step in range(steps):
        if step == steps - 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        loss = model(x, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() - (given if hidden else before)
    return losses, peak, unwall.api.engine(model).activations


def test_auto_keeps_everything_where_it_fits():
    losses, _, _ = small_model(None, activations="keep")
    found, _, auto = small_model(None)
    assert found == losses
    assert set(auto.used) == {"keep"}
    assert auto._plain  # nothing is measured any more


@pytest.mark.parametrize("budget", ["360MiB", "420MiB"])
def test_auto_stays_within_a_small_budget(budget):
    losses, _, _ = small_model(None, activations="keep")
    found, peak, auto = small_model(budget)
    assert auto.tiles.count == 1  # dropout would draw other numbers
    assert found == losses
    assert set(auto.used) != {"keep"}
    assert peak <= unwall.Plan(device_bytes=budget).budget_device_bytes


class Fails:
    def __init__(self, call):
        self.call, self.count = call, 0

    def __call__(self, *_):
        self.count += 1
        if self.count == self.call:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("call", [1, 3])
def test_an_out_of_memory_in_a_block_is_survived(call):
    losses, _, _ = small_model(None, activations="keep", steps=3)
    torch.manual_seed(0)
    model = Net()
    model.blocks[3].drop.register_forward_hook(Fails(call))
    unwall.shard(model, unwall.Plan(params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    x, labels = torch.randn(4, 1024, WIDTH, device="cuda"), torch.randint(0, 5000, (4, 1024), device="cuda")
    found = []
    for _ in range(3):
        try:
            loss = model(x, labels)
            loss.backward()
        except torch.OutOfMemoryError:
            assert call == 3  # a pass that is not measured, or a backward: then the iteration is the loop's to run again
            return
        optimizer.step()
        found.append(loss.item())
    assert unwall.stats(model).activations.survived == 1
    assert found == losses


@pytest.mark.parametrize("choice", ["keep", "move", "recompute", "host"])
def test_compiled_blocks_with_each_choice(choice, monkeypatch):
    monkeypatch.setattr(Observed, "best", lambda self, *_: (choice,) * len(self.blocks))
    losses, _, auto = small_model("1GiB", compiled=True)
    assert set(auto.used) == {choice}
    assert all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < losses[0]


def test_sequence_tiles_give_the_losses_with_less_memory():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return self.down(self.act(self.up(x)))

    found = []
    for tiles in (None, 8):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), Mlp()) for _ in range(3)))
        plan = unwall.Plan(params="device", optimizer="device", activations="keep", sequence_tiles=tiles)
        unwall.shard(model, plan)
        x = torch.randn(1, 32768, WIDTH, device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            loss = model(x).square().mean()
            loss.backward()
            model.zero_grad()
        found.append((loss.item(), torch.cuda.max_memory_allocated()))
        del model, loss
        gc.collect()
    (plain, most), (tiled, least) = found
    assert tiled == pytest.approx(plain, rel=1e-2)
    assert least < most - (500 << 20)


# -- whole blocks that move -------------------------------------------------------------------------------------------


class Light(nn.Module):
    """Little arithmetic for what it saves, so that a copy that nobody waits for shows; packed projections, dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(256), nn.Linear(256, 768, bias=False)
        self.out, self.drop = nn.Linear(256, 256), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):  # the same bits in each run
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(y))
        for _ in range(6):
            x = torch.sin(x) * torch.sigmoid(x) + x
        return x


def grads_of(choose, in_flight, batches, monkeypatch, twice=False):
    """The gradients of each batch, whose lengths differ, and what came back from the host. ``choose``: None for keep."""
    monkeypatch.setattr(saved_on_host, "IN_FLIGHT_BYTES", in_flight)
    monkeypatch.setattr(saved_on_host, "AHEAD_BYTES", in_flight)
    if choose is not None:
        monkeypatch.setattr(Observed, "best", lambda self, *_: tuple(choose(at) for at in range(len(self.blocks))))
    torch.manual_seed(0)
    model = nn.Sequential(*(Light() for _ in range(8)))
    activations = "keep" if choose is None else "auto"
    unwall.shard(model, unwall.Plan(params="device", optimizer="device", compute_dtype=torch.float32, activations=activations))
    found = []
    for number, (batch, length) in enumerate(batches):
        torch.manual_seed(number)
        x = torch.randn(batch, length, 256, device="cuda")
        loss = model(x).square().mean()
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        noise = torch.randn(64 << 20, device="cuda")  # takes whatever was freed too early
        found.append([param.grad.clone() for param in model.parameters()])
        model.zero_grad()
        del noise, loss
    back = unwall.stats(model).links.get("host>device")
    return found, 0 if back is None else back.moved_bytes, unwall.api.engine(model).activations


BATCHES = [(8, 1024)] * 3 + [(8, 1024), (4, 512), (8, 768), (16, 1024), (8, 1024), (2, 256), (8, 1024)]


@pytest.mark.parametrize("in_flight", [1 << 20, 64 << 20, 1 << 30])
@pytest.mark.parametrize("kind", ["all", "mixed"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_whole_blocks_that_move_give_the_gradients_of_keep(in_flight, kind, twice, monkeypatch):
    mixed = ("move", "keep", "host", "move", "recompute", "move", "move", "keep")
    expected, _, _ = grads_of(None, in_flight, BATCHES, monkeypatch, twice)
    again, _, _ = grads_of(None, in_flight, BATCHES, monkeypatch, twice)
    choose = (lambda _: "move") if kind == "all" else (lambda at: mixed[at])
    found, back, auto = grads_of(choose, in_flight, BATCHES, monkeypatch, twice)
    assert "move" in auto.used
    if in_flight < 1 << 30:
        assert back > 100 << 20
    for at, (ours, theirs, same) in enumerate(zip(found, expected, again, strict=True)):
        for one, other, repeat in zip(ours, theirs, same, strict=True):
            assert torch.isfinite(one).all()
            if torch.equal(other, repeat):  # keep gives the same bits twice
                assert torch.equal(one, other), f"batch {at}: {(one - other).abs().max().item()}"
            else:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_whole_blocks_of_a_graph_that_is_dropped(monkeypatch):
    """Its copies may be under way when its memory is given to others."""
    monkeypatch.setattr(Observed, "best", lambda self, *_: ("move",) * len(self.blocks))
    monkeypatch.setattr(saved_on_host, "IN_FLIGHT_BYTES", 8 << 20)
    torch.manual_seed(0)
    model = nn.Sequential(*(Light() for _ in range(8))).eval()
    unwall.shard(model, unwall.Plan(params="device", optimizer="device", compute_dtype=torch.float32))
    x = torch.randn(8, 1024, 256, device="cuda")
    grads = []
    for number in range(12):
        loss = model(x).square().mean()
        if number % 3 == 1:
            del loss  # no backward
            continue
        loss.backward()
        grads.append([param.grad.clone() for param in model.parameters()])
        model.zero_grad()
    for later in grads[1:]:
        for one, other in zip(later, grads[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
