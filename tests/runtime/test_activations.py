"""``Plan(activations=...)``: kept, recomputed or moved to host or disk, the values are the same."""

import sys
import warnings

import pytest
import torch
from models_with_blocks import MAKERS, Convolutions, decoder, encoder_decoder
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.runtime import saved_on_disk, saved_on_host
from unwall.runtime.recompute import repeated_blocks
from unwall.schedule.activations import everywhere
from unwall.schedule.observed import Observed

CHOICES = ["recompute", "host"]


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """Also what is as small as in these models; and nothing is still on the device when it is needed again."""
    monkeypatch.setattr(saved_on_host, "MIN_BYTES", 1)
    monkeypatch.setattr(saved_on_host, "IN_FLIGHT_BYTES", 0)


def trained(make, activations, tier="device", steps=3, **options):
    """Losses and parameters after some steps."""
    torch.manual_seed(0)
    model, loss_of = make()
    plan = unwall.Plan(params=tier, optimizer=tier, activations=activations, compute_dtype=torch.float32, **options)
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict(), model


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("activations", CHOICES)
def test_the_bits_are_those_of_keep(make, activations):
    losses, values, _ = trained(make, "keep")
    for tier in ("device", "host"):
        found, state, model = trained(make, activations, tier)
        exact = make is not encoder_decoder  # with checkpoints plain PyTorch adds up its output's gradient in another order
        assert found == pytest.approx(losses, abs=0 if exact else 1e-5, rel=0)
        for name, value in values.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0 if exact else 1e-5)
        if activations == "host":
            assert moved_bytes(model) > 0


@pytest.mark.parametrize("activations", CHOICES)
def test_a_tight_device(activations):
    """A block is recomputed while its groups come and go. Nothing that the checkpoint keeps holds their memory."""
    losses, values, _ = trained(decoder, "keep")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # "is kept by your code"
        found, state, _ = trained(decoder, activations, "host", device_bytes="60KiB")
    assert found == losses
    assert all(torch.equal(state[name], value) for name, value in values.items())


def in_between(activations, folder):
    """Gradients of graphs that are used twice and overtake each other, with exceptions in forward and in backward between."""
    torch.manual_seed(0)
    model, loss_of = decoder()
    options = {"disk": folder} if activations == "disk" else {}
    unwall.shard(model, unwall.Plan(activations=activations, compute_dtype=torch.float32, **options))
    torch.manual_seed(1)

    def stop(*_):
        raise RuntimeError("stop")

    first = loss_of()
    handle = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stop"):
        loss_of()
    handle.remove()
    handle = model.model.norm.register_forward_hook(lambda _module, _args, output: output.register_hook(stop) and None)
    with pytest.raises(RuntimeError, match="stop"):
        loss_of().backward()
    handle.remove()
    model.zero_grad()
    torch.manual_seed(2)
    second = loss_of()
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("activations", [*CHOICES, "disk"])
def test_graphs_used_twice_and_exceptions_in_between(activations, tmp_path):
    expected = in_between("keep", tmp_path)
    found = in_between(activations, tmp_path)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.out(torch.tanh(self.inner(x)))


def test_compiled_blocks_with_each_choice(tmp_path):
    """Those that ``"auto"`` makes: test_auto_activations.py."""

    def make():
        model = nn.Sequential(Small(), Small())
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)  # a wrapper inside would break the graph
        x = torch.linspace(-1, 1, 32).view(4, 8)
        return model, lambda: model(x.clone().requires_grad_()).square().mean()

    losses, values, _ = trained(make, "keep")
    for activations in (*CHOICES, "disk"):
        found, state, _ = trained(make, activations, **({"disk": tmp_path} if activations == "disk" else {}))
        assert found == pytest.approx(losses, rel=1e-6), activations
        for name, value in values.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


# -- what moves -------------------------------------------------------------------------------------------------------


def sharded(model, activations="host", **options):
    return unwall.shard(model, unwall.Plan(activations=activations, compute_dtype=torch.float32, **options))


def moved_bytes(model, way="device>host"):
    links = unwall.stats(model).links
    return links[way].moved_bytes if way in links else 0


class Projections(nn.Module):
    """Three matrices that save the same input."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return sum(part(x) for part in self.parts)


def test_a_storage_that_is_saved_often_moves_once(monkeypatch):
    monkeypatch.setattr(saved_on_host, "IN_FLIGHT_BYTES", 1 << 20)
    model = sharded(Projections())
    x = torch.randn(4, 8, requires_grad=True)
    unwall.stats(model).reset()
    model(x * 1).sum().backward()
    assert moved_bytes(model) == 4 * 8 * 4
    assert moved_bytes(model, "host>device") == 0  # it was still there


class Gated(nn.Module):
    """A product saves both of its factors, and three matrices the same input."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)) * self.up(x)


def test_what_left_comes_back_once():
    """Also what several nodes have saved. A second copy would be written to memory that nobody holds any more."""
    model = sharded(Gated())
    engine = unwall.api.engine(model)
    unwall.stats(model).reset()
    model(torch.randn(4, 8, requires_grad=True) * 1).sum().backward()
    assert moved_bytes(model) > 0
    assert moved_bytes(model, "host>device") <= moved_bytes(model)
    left = [layer for layer in engine.forward.saved.layers if isinstance(layer, saved_on_host.SavedOnHost)]
    assert [len(layer._by_number) for layer in left] == [0]


class Packed(nn.Module):
    """Attention whose queries, keys and values are parts of one projection, and a conjugated product."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24, bias=False)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.mT, dim=-1) @ v
        turned = torch.view_as_complex(mixed.unflatten(-1, (-1, 2)).contiguous())
        return (turned.conj() * turned.conj() * turned).abs()


def test_parts_of_a_packed_projection_move_and_conjugates_are_right():
    x, grads = torch.randn(2, 16, 8), {}
    for activations in ("keep", "host"):
        torch.manual_seed(0)
        model = sharded(Packed(), activations)
        unwall.stats(model).reset()
        model(x.clone().requires_grad_() * 1).sum().backward()
        grads[activations] = model.project.weight.grad.clone()
    assert torch.equal(grads["host"], grads["keep"])
    assert moved_bytes(model) == 2 * 16 * (8 + 24 + 16 + 24) * 4  # input, projection, softmax, three results of 8


def test_what_does_not_fit_the_device_ahead_comes_when_it_is_needed(monkeypatch):
    """The first copy ahead in each backward fails."""
    plain, failures = saved_on_host.SavedOnHost._fetch, []

    def fails(self, moved):
        if sys._getframe(1).f_code.co_name == "_fetches" and len(failures) < 3:
            failures.append(moved)
            raise torch.OutOfMemoryError("injected")
        plain(self, moved)

    monkeypatch.setattr(saved_on_host.SavedOnHost, "_fetch", fails)
    losses, _, _ = trained(decoder, "keep")
    found, _, _ = trained(decoder, "host")
    assert failures
    assert found == losses


def test_host_memory_is_used_again_and_given_back():
    model = sharded(Projections())
    host = unwall.api.engine(model).tiers.host.ledger
    before = host.live_bytes
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        held = host.live_bytes - before
        assert held > 0
    for _ in range(5):
        model(torch.randn(4, 8)).sum().backward()
    assert host.live_bytes - before == held
    host.reclaim()
    assert host.live_bytes == before


def test_what_does_not_fit_the_host_stays():
    model = sharded(Projections(), host_bytes=0)
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    assert moved_bytes(model) == 0
    assert x.grad is not None


def test_a_graph_that_is_kept_is_run_again():
    model = sharded(Projections())
    x = torch.randn(4, 8, requires_grad=True)
    loss = model(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert first.abs().sum() > 0


def test_a_forward_that_is_given_up_leaves_nothing():
    model = sharded(Projections())
    host = unwall.api.engine(model).tiers.host.ledger
    before = host.live_bytes
    for _ in range(3):
        model(torch.randn(4, 8))  # no backward
    with pytest.raises(RuntimeError, match="stop"):
        _raise_in(model)
    host.reclaim()
    assert host.live_bytes == before


def _raise_in(model):
    def stop(*_):
        raise RuntimeError("stop")

    handle = model.parts[2].register_forward_pre_hook(stop)
    try:
        model(torch.randn(4, 8))
    finally:
        handle.remove()


class Squared(nn.Module):
    """Changes in place what it has saved."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        y = x * self.weight
        z = y.square()
        y.add_(1)
        return z


@pytest.mark.parametrize("in_flight", [1 << 20, 64])
def test_a_tensor_changed_while_it_moves_is_an_error(monkeypatch, in_flight):
    monkeypatch.setattr(saved_on_host, "IN_FLIGHT_BYTES", in_flight)
    model = sharded(Squared())
    with pytest.raises(RuntimeError, match="modified since by an inplace operation"):
        model(torch.randn(2, 8)).sum().backward()


# -- what is recomputed -----------------------------------------------------------------------------------------------


def counted(block, calls):
    inner = block.forward

    def forward(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    block.forward = forward


def test_blocks_of_models():
    names = [name for name, _ in repeated_blocks(Convolutions())]
    assert names == ["stages.0.0", "stages.0.1", "stages.2.0", "stages.2.1"]
    assert [name for name, _ in repeated_blocks(decoder()[0])] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert list(repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == []


def test_each_block_runs_twice_and_not_in_evaluation():
    model, calls = Convolutions(), []
    for _, block in repeated_blocks(model):
        counted(block, calls)
    sharded(model, "recompute")
    x = torch.randn(1, 3, 12, 12)
    model(x).sum().backward()
    assert len(calls) == 8
    with torch.no_grad():
        model(x)
    assert len(calls) == 12


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_the_users_is_not_doubled(reentrant):
    class Checkpointed(Convolutions):
        def forward(self, x):
            x = self.stem(x)
            for stage in self.stages:
                x = checkpoint(stage, x, use_reentrant=reentrant)
            return self.head(x.mean((2, 3)))

    model, calls = Checkpointed(), []
    for _, block in repeated_blocks(model):
        counted(block, calls)
    sharded(model, "recompute")
    model(torch.randn(1, 3, 12, 12)).sum().backward()
    assert len(calls) == 8


def test_it_says_when_there_is_nothing_to_do():
    with pytest.warns(UserWarning, match="has no repeated blocks"):
        sharded(nn.Linear(2, 2), "recompute")
    model, _ = decoder()
    model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="LlamaForCausalLM checkpoints already"):
        sharded(model, "recompute")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(decoder()[0], "recompute")


class Counting(nn.Module):
    """What it computes depends on buffers that it writes: one in place, one anew, and the vectors of a spectral norm."""

    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.count += 1
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x + self.inner(torch.tanh(x * self.count.clone() - self.mean))


@pytest.mark.parametrize("activations", [*CHOICES, "auto"])
def test_a_block_runs_again_with_its_buffers_of_then(activations, monkeypatch):
    monkeypatch.setattr(Observed, "best", lambda self, *_: everywhere("recompute", self.blocks))
    found = {}
    for choice in ("keep", activations):
        torch.manual_seed(0)
        model = sharded(nn.Sequential(Counting(), Counting()), choice, device_bytes="1GiB", params="device", optimizer="device")
        x = torch.linspace(-1, 1, 32).view(4, 8)
        for _ in range(4):
            loss = (model(x) + model(2 * x)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        found[choice] = [param.grad.clone() for param in model.parameters()] + [buffer.clone() for buffer in model.buffers()]
    assert all(torch.equal(one, other) for one, other in zip(found["keep"], found[activations], strict=True))


class Odd(Small):
    """Buffers that have no ``nbytes``, or that nobody can write to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(4).to_sparse())
        self.register_buffer("ones", torch.ones(1).expand(8))

    def forward(self, x):
        return torch.sparse.mm(self.edges, super().forward(x)) * self.ones


@pytest.mark.parametrize("activations", CHOICES)
def test_sparse_and_expanded_buffers(activations):
    found = {}
    for choice in ("keep", activations):
        torch.manual_seed(0)
        model = sharded(nn.Sequential(Odd(), Odd()), choice)
        for _ in range(2):
            model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
        found[choice] = [param.grad.clone() for param in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(found["keep"], found[activations], strict=True))


class Named(Small):
    def forward(self, *, x, masks):
        return super().forward(x) * masks[0]


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Named(), Named()])

    def forward(self, x, masks):
        for block in self.blocks:
            x = block(x=x * 1, masks=masks)
        return x


def test_inputs_that_are_given_by_name_move():
    model = sharded(ByName())
    unwall.stats(model).reset()
    model(torch.randn(4, 8, requires_grad=True), (torch.ones(8),)).sum().backward()
    assert moved_bytes(model) == 2 * 4 * 8 * 4


@pytest.mark.parametrize("activations", CHOICES)
def test_a_tensor_inside_of_an_argument_that_is_changed_is_an_error(activations):
    model, mask = sharded(ByName(), activations), torch.ones(8)
    loss = model(torch.randn(4, 8, requires_grad=True), (mask,)).sum()
    mask.zero_()
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(8,\) inside of another value.*modified since"):
        loss.backward()


# -- on disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
def test_on_disk_the_bits_are_those_of_keep(make, tmp_path):
    losses, values, _ = trained(make, "keep")
    found, state, model = trained(make, "disk", disk=str(tmp_path))
    exact = make is not encoder_decoder
    assert found == pytest.approx(losses, abs=0 if exact else 1e-5, rel=0)
    for name, value in values.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0 if exact else 1e-5)
    assert moved_bytes(model, "host>disk") == moved_bytes(model) > 0


class Deep(nn.Sequential):
    """Each layer saves its input: 32 KiB."""

    def __init__(self):
        super().__init__(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(24)))


def gradients_of_deep(activations, **options):
    torch.manual_seed(0)
    model = Deep()
    sharded(model, activations, **options)
    x = torch.randn(128, 64, requires_grad=True)
    model(x).square().sum().backward()
    return x.grad, model


@pytest.mark.parametrize("window", [0, 100 << 10, 1 << 30])
def test_on_disk_activations_take_a_window_of_the_host(monkeypatch, tmp_path, window):
    monkeypatch.setattr(saved_on_disk, "WINDOW_BYTES", window)
    expected, _ = gradients_of_deep("keep")
    got, model = gradients_of_deep("disk", disk=str(tmp_path))
    assert torch.equal(got, expected)
    tiers = unwall.stats(model).tiers
    assert tiers["host"].peak_bytes <= max(window, 32 << 10) + (64 << 10)
    assert tiers["disk"].peak_bytes >= 23 * (32 << 10)
    assert moved_bytes(model, "disk>host") > 0 or window == 1 << 30


def test_a_graph_on_disk_is_run_again_and_given_up(tmp_path):
    model = sharded(Deep(), "disk", disk=str(tmp_path))
    x = torch.randn(128, 64, requires_grad=True)
    loss = model(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    del loss
    disk = unwall.api.engine(model).tiers.disk.ledger
    for _ in range(3):
        model(x)  # no backward
    assert disk.live_bytes == 0


def test_a_disk_that_is_full_leaves_activations_on_the_host(tmp_path):
    expected, _ = gradients_of_deep("keep")
    with pytest.warns(RuntimeWarning, match="stay in host memory from now on"):
        got, model = gradients_of_deep("disk", disk=str(tmp_path), disk_bytes=100 << 10)
    assert torch.equal(got, expected)
    assert unwall.stats(model).tiers["host"].peak_bytes > 15 * (32 << 10)


def test_what_could_not_be_read_is_read_again(monkeypatch, tmp_path):
    """A backward that fails may be tried again: never with what the host's memory held before."""
    monkeypatch.setattr(saved_on_disk, "WINDOW_BYTES", 0)
    model = sharded(Deep(), "disk", disk=str(tmp_path))
    x = torch.randn(128, 64, requires_grad=True)
    loss = model(x).square().sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    links, failed = unwall.api.engine(model).tiers.links, []
    copy = links.copy

    class Failing:
        def __init__(self, ticket):
            self.ticket, self.done = ticket, ticket.done

        def wait(self):
            self.ticket.wait()
            raise OSError("injected")

    def fails_once(source, target, label):
        ticket = copy(source, target, label)
        if failed:
            return ticket
        failed.append(target)
        return Failing(ticket)

    monkeypatch.setattr(links, "copy", fails_once)
    with pytest.raises(OSError, match="injected"):
        torch.autograd.grad(loss, x, retain_graph=True)
    failed[0].block.data.fill_(7)
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


def test_a_directory_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist: create it"):
        sharded(Deep(), "disk", disk=str(tmp_path / "nowhere"))


def test_a_move_keeps_the_disk_for_activations(tmp_path):
    model = sharded(Deep(), "disk", disk=str(tmp_path))
    unwall.move(model, unwall.Plan(activations="disk", compute_dtype=torch.float32, params="host", disk=str(tmp_path)))
    model(torch.randn(128, 64)).sum().backward()
    assert moved_bytes(model, "host>disk") > 0
