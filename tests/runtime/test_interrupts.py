"""A caught Ctrl-C in the middle of a forward or a fetch: the next iteration runs as if nothing had happened."""

import signal

import pytest
import torch
from torch import nn

import unwall
from unwall.native import interrupts
from unwall.plans import Plan
from unwall.shards import group as group_module

WIDTH = 32


class Nervous(nn.Module):
    """Raises once, when told to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.interrupt = False

    def forward(self, x):
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        return self.linear(x)


def start(place, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Nervous(), nn.Tanh()), nn.Linear(WIDTH, WIDTH))
    unwall.shard(model, Plan(params=place, optimizer=place, compute_dtype=torch.float32, disk=folder))
    return model, unwall.AdamW(model.parameters(), lr=1e-2)


def iterate(model, optimizer, seed):
    torch.manual_seed(seed)
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_an_interrupt_in_forward_is_forgotten(place, tmp_path):
    expected = [iterate(*pair, seed) for pair in [start(place, tmp_path)] for seed in range(5)]
    model, optimizer = start(place, tmp_path)
    losses = [iterate(model, optimizer, seed) for seed in range(2)]
    model[1][0].interrupt = True
    with pytest.raises(KeyboardInterrupt):
        iterate(model, optimizer, 99)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        losses += [iterate(model, optimizer, 2)]
    assert saved  # the hooks around the model are seen again
    unwall.stats(model).reset()
    losses += [iterate(model, optimizer, seed) for seed in range(3, 5)]
    assert losses == expected
    assert unwall.stats(model).trace_mismatches == 0  # the order of a whole pass is known


def test_a_submodule_after_the_interrupt_and_a_step(tmp_path):
    model, optimizer = start("host", tmp_path)
    model[1][0].interrupt = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, WIDTH))
    optimizer.step()  # nothing to update, but the interrupted call is over
    assert not unwall.api.engine(model).forward.running
    assert model[0](torch.randn(4, WIDTH)).shape == (4, WIDTH)


def test_a_model_that_calls_itself_is_no_interrupt(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, again=True):
            return self.linear(self(x, again=False) if again else x)

    torch.manual_seed(0)
    plain, model = Twice(), Twice()
    model.load_state_dict(plain.state_dict())
    unwall.shard(model, Plan(params="host", optimizer="host", compute_dtype=torch.float32))
    x = torch.randn(4, WIDTH)
    assert torch.equal(model(x), plain(x))


def test_an_interrupted_fetch_waits_for_its_copy(monkeypatch, tmp_path):
    """The memory must not go while the copy still writes to it."""
    model, optimizer = start("host", tmp_path)
    expected = [iterate(*pair, seed) for pair in [start("host", tmp_path)] for seed in range(3)]
    losses = [iterate(model, optimizer, 0)]
    engine = unwall.api.engine(model)
    waited = []

    def interrupted(ticket, device):
        waited.append(ticket)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(group_module, "order_after", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iterate(model, optimizer, 99)
    assert all(ticket.done() for ticket in waited)
    assert engine.device.ledger.live_bytes == 0
    optimizer.zero_grad()
    losses += [iterate(model, optimizer, seed) for seed in range(1, 3)]
    assert losses == expected


@pytest.mark.parametrize("who", ["model", "optimizer"])
def test_a_gradient_that_backward_left_behind_is_forgotten(who, tmp_path):
    """Interrupted between autograd and our hook, a gradient stays in ``.grad``: the next backward would add to it."""
    model, optimizer = start("host", tmp_path)
    expected = [iterate(*pair, seed) for pair in [start("host", tmp_path)] for seed in range(3)]
    for param in model.parameters():
        param.grad = torch.ones(param.shape)
    {"model": model, "optimizer": optimizer}[who].zero_grad()
    assert [iterate(model, optimizer, seed) for seed in range(3)] == expected


@pytest.mark.parametrize("place", ["device", "host"])
def test_a_backward_after_one_that_failed(place, tmp_path):
    """Both graphs were there before. What the second one brings is shown, and may be clipped."""

    def fail(_):
        raise ArithmeticError("told to")

    def run(model):
        torch.manual_seed(1)
        first, second = model(torch.randn(4, WIDTH)), model(torch.randn(4, WIDTH))
        first.register_hook(fail)
        with pytest.raises(ArithmeticError):
            first.sum().backward()
        second.square().mean().backward()
        return [float(param.grad.norm()) for param in model.parameters()]

    model, _ = start(place, tmp_path)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Nervous(), nn.Tanh()), nn.Linear(WIDTH, WIDTH))
    assert run(model) == pytest.approx(run(plain))


def test_a_turn_that_was_interrupted_as_it_was_taken_is_free():
    """A signal that comes inside of that is raised at its end, when the turn is taken already."""
    model = unwall.shard(nn.Linear(4, 4), Plan(params="device", optimizer="device", compute_dtype=torch.float32))
    model(torch.ones(1, 4))
    turn = unwall.api.engine(model).turn
    real = turn._lock

    class Interrupting:
        """The lock that the turn is taken under. The signal comes before it is given back."""

        def __enter__(self):
            return real.__enter__()

        def __exit__(self, *error):
            signal.raise_signal(signal.SIGINT)
            return real.__exit__(*error)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell has begun us with &
    try:
        interrupts.install()
        turn._lock = Interrupting()
        with pytest.raises(KeyboardInterrupt), unwall.full_params(model):
            raise AssertionError("it was interrupted before")
    finally:
        turn._lock = real
        signal.signal(signal.SIGINT, before)
    assert turn._thread is None
    with unwall.full_params(model):
        assert turn._thread is not None
    assert turn._thread is None
