"""Gradients of small groups, of which backward only makes a note: whatever happens between two of them, the bits are those of
gradients that are taken with care, one by one."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.runtime.arrivals import Arrivals
from unwall.runtime.held_grad import HeldGrad
from unwall.shards import accumulate

WIDTH, STEPS = 16, 3


class Net(nn.Module):
    """Six layers, of which one runs twice and one is a checkpoint's, a head that may be left out, and a scalar."""

    def __init__(self, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, WIDTH))
        self.reentrant = reentrant

    def forward(self, x, head=True):
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        x = torch.tanh(self.layers[1](x)) * self.scale
        if self.reentrant:  # two checkpoints share a layer: its gradient comes twice
            for _ in range(2):
                x = checkpoint(lambda value: torch.tanh(self.layers[3](value)), x, use_reentrant=True)
        else:
            x = checkpoint(self.layers[3], x, use_reentrant=False)
        for layer in self.layers[4:]:
            x = torch.tanh(layer(x))
        x = x + self.nothing.sum()
        return self.head(x) if head else x


def usual(net, opt, loss, step):
    loss.backward()
    opt.step()
    opt.zero_grad()


def without_the_head(net, opt, loss, step):
    net(torch.full((2, WIDTH), 0.1 * step), head=False).square().mean().backward()
    usual(net, opt, loss, step)


def twice(net, opt, loss, step):
    loss.backward(retain_graph=True)
    loss.backward()
    opt.step()
    opt.zero_grad()


def with_a_graph(net, opt, loss, step):
    loss.backward(create_graph=True)
    opt.step()
    opt.zero_grad()


def cleared_in_the_middle(net, opt, loss, step):
    """A hook forgets what has come so far."""
    handle = net.layers[2].weight.register_post_accumulate_grad_hook(lambda _: net.zero_grad())
    loss.backward()
    handle.remove()
    opt.step()
    opt.zero_grad()


def fails(net, loss):
    def fail(_):
        raise ValueError("in the middle")

    handle = net.layers[2].weight.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        loss.backward()
    handle.remove()


def ends_in_the_middle(net, opt, loss, step):
    fails(net, loss)
    opt.zero_grad()
    usual(net, opt, net(torch.full((2, WIDTH), 0.3)).square().mean(), step)


def steps_with_what_came(net, opt, loss, step):
    """A backward that ends in the middle, and a step with what it has brought."""
    fails(net, loss)
    opt.step()
    opt.zero_grad()


def some_frozen(net, opt, loss, step):
    net.layers[4].requires_grad_(step % 2 == 0)
    usual(net, opt, net(torch.full((2, WIDTH), 0.2)).square().mean(), step)


def scaled_in_a_hook(net, opt, loss, step):
    """What a hook of the user's makes of ``.grad`` counts."""

    def double(param):
        param.grad.mul_(2)

    handles = [layer.weight.register_post_accumulate_grad_hook(double) for layer in net.layers]
    loss.backward()
    for handle in handles:
        handle.remove()
    opt.step()
    opt.zero_grad()


def in_parts(net, opt, loss, step):
    """A backward of some parameters, then one of the others: the graph is the same."""
    half = [*net.layers[:2].parameters()]
    rest = [param for param in net.parameters() if all(param is not one for one in half)]
    loss.backward(inputs=half, retain_graph=True)
    loss.backward(inputs=rest)
    opt.step()
    opt.zero_grad()


LOOPS = [
    usual, without_the_head, twice, with_a_graph, cleared_in_the_middle, ends_in_the_middle, steps_with_what_came, some_frozen,
    scaled_in_a_hook, in_parts,
]  # fmt: skip


def trained(loop, plan, wrap, reentrant=False):
    torch.manual_seed(0)
    net = Net(reentrant)
    net, opt = wrap(net, plan)
    for step in range(STEPS):
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).mul(step + 1).requires_grad_()
        loop(net, opt, net(x).float().square().mean(), step)
    return {name: value.detach().float().clone() for name, value in net.state_dict().items()}


def sharded(net, plan):
    unwall.shard(net, plan)
    return net, unwall.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)


def notes(monkeypatch):
    """How many gradients were only noted."""
    made, count = Arrivals.note_arrival, []

    def counted(self, param):
        done = made(self, param)
        count.append(done)
        return done

    monkeypatch.setattr(Arrivals, "note_arrival", counted)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loop", "reentrant"),
    [*((loop, False) for loop in LOOPS), *((loop, True) for loop in LOOPS if loop not in (with_a_graph, in_parts))],
)
def test_noted_gradients_have_the_bits_of_those_taken_with_care(loop, reentrant, dtype, monkeypatch):
    plan = unwall.Plan(params="device", optimizer="device", compute_dtype=dtype)
    count = notes(monkeypatch)
    found = trained(loop, plan, sharded, reentrant)
    assert any(count) != (loop is with_a_graph)  # gradients with a graph are taken with care
    del count[:]
    monkeypatch.setattr(accumulate, "COPIED_AT_ONCE_BYTES", 0)
    expected = trained(loop, plan, sharded, reentrant)
    assert not count
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("loop", [usual, without_the_head, twice, in_parts], ids=lambda loop: loop.__name__)
def test_noted_gradients_are_those_of_plain_torch(loop):
    def plain(net, _):
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
        step = opt.step

        def clipped():
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            step()

        opt.step = clipped
        return net, opt

    plan = unwall.Plan(params="device", optimizer="device", compute_dtype=torch.float32)
    found, expected = trained(loop, plan, sharded), trained(loop, None, plain)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_parameter_put_in_anothers_place_is_taken_with_care():
    """New parameters after ``shard``, between two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    twin = copy.deepcopy(model)
    unwall.shard(model, unwall.Plan(params="device", optimizer="device", compute_dtype=torch.float32))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(4):
        if step == 2:
            torch.manual_seed(1)
            model[1] = nn.Linear(WIDTH, WIDTH)
            twin[1] = copy.deepcopy(model[1])
            model(x)  # takes it in
            optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
            reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        for net, opt in ((model, optimizer), (twin, reference)):
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tiles", [None, 4])
def test_what_grad_shows_is_made_once(tiles, monkeypatch):
    made, make = [], HeldGrad.make
    monkeypatch.setattr(HeldGrad, "make", staticmethod(lambda *given: made.append(given) or make(*given)))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    unwall.shard(model, unwall.Plan(params="device", optimizer="device", tiles=tiles))
    optimizer = unwall.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(4, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(made) == 4


def test_gradients_are_joined_again_after_a_backward_that_failed(monkeypatch):
    joined, join = [], accumulate.Accumulator._join
    monkeypatch.setattr(accumulate.Accumulator, "_join", lambda self: joined.append(join(self)) or joined[-1])
    net = unwall.shard(Net(), unwall.Plan())
    opt = unwall.AdamW(net.parameters())
    fails(net, net(torch.ones(2, WIDTH)).square().mean())
    opt.zero_grad()
    for step in range(STEPS):
        usual(net, opt, net(torch.ones(2, WIDTH)).square().mean(), step)
    assert joined[-STEPS:] == [True] * STEPS


def test_a_gradient_that_a_hook_has_kept_stays_as_it_was():
    net = unwall.shard(nn.Linear(WIDTH, WIDTH, bias=False), unwall.Plan(compute_dtype=torch.float32))
    opt = unwall.AdamW(net.parameters())
    kept = []
    net.weight.register_hook(kept.append)
    net(torch.ones(2, WIDTH)).square().mean().backward()
    before = kept[0].clone()
    opt.clip_grad_norm_(1e-3)
    assert float(net.weight.grad.norm()) == pytest.approx(1e-3, rel=1e-3)
    opt.step()
    assert torch.equal(kept[0], before)
