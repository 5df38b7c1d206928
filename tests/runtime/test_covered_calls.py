"""Modules whose parameters lie in one group, or in two in turn, count as one call where groups come and go."""

import pytest
import torch
from bench.overhead import Layer
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unwall

WIDTH, LAYERS = 16, 24


class Borrower(nn.Module):
    """A block that also reads the weight of another one, and may fail between its layers."""

    def __init__(self, lender):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.__dict__["lender"] = lender
        self.fails = False

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.lender is not None:
            x = functional.linear(x, self.lender.second.weight) + self.lender.first(x)
        if self.fails:
            raise ArithmeticError("on purpose")
        return torch.tanh(self.second(x))


def borrowing():
    torch.manual_seed(0)
    blocks = []
    for at in range(LAYERS):
        blocks.append(Borrower(blocks[0] if at % 3 == 2 else None))
    return nn.Sequential(*blocks)


def adapted():
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, 2) for _ in range(LAYERS)))


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def sharded(model, device_bytes):
    plan = unwall.Plan(compute_dtype=torch.float32, params="host", optimizer="host", device_bytes=device_bytes)
    unwall.shard(model, plan)
    return unwall.AdamW(trainable(model), lr=1e-2)


def step(model, optimizer):
    model(torch.full((2, WIDTH), 0.5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_layer_is_one_use_of_each_of_its_groups():
    model = adapted()
    optimizer = sharded(model, 128 << 10)
    step(model, optimizer)
    executor = unwall.api.engine(model).executor
    assert any(group.evictable for group in executor.groups)
    used, use = [], executor.use
    executor.use = lambda index: (used.append(index), use(index))[1]
    step(model, optimizer)
    assert len(used) <= 4 * LAYERS  # a layer has 22 calls


@pytest.mark.parametrize(("build", "device_bytes"), [(adapted, 96 << 10), (borrowing, 32 << 10)])
def test_values_are_those_of_plain_pytorch(build, device_bytes):
    plain, model = build(), build()
    reference = torch.optim.AdamW(trainable(plain), lr=1e-2)
    optimizer = sharded(model, device_bytes)
    for _ in range(4):
        step(plain, reference)
        step(model, optimizer)
    for (name, expected), found in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_a_call_that_fails_inside_covers_no_longer():
    plain, model = borrowing(), borrowing()
    sharded(model, 32 << 10)
    model[13].fails = True
    with pytest.raises(ArithmeticError, match="on purpose"):
        model(torch.ones(2, WIDTH))
    model[13].fails = False
    assert unwall.api.engine(model).forward.covered.frame is None
    torch.testing.assert_close(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))
    torch.testing.assert_close(model[1].first(torch.ones(2, WIDTH)), plain[1].first(torch.ones(2, WIDTH)))


def test_new_values_after_an_interrupted_call_are_seen_by_its_parts():
    model, plain = borrowing(), borrowing()
    optimizer = sharded(model, 32 << 10)
    step(model, optimizer)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model[5].first.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, WIDTH))
    hook.remove()
    values = {name: 1.1 * value for name, value in plain.state_dict().items()}
    model.load_state_dict(values)
    plain.load_state_dict(values)
    x = torch.ones(2, WIDTH)
    assert torch.equal(model[5].first(x), plain[5].first(x))
    assert torch.equal(model(x), plain(x))
    executor = unwall.api.engine(model).executor
    assert not any(executor.is_pinned(index) for index in range(len(executor.groups)))


class Steered(nn.Module):
    """Adds the gradient of what it computes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inner(self, x):
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x):
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(checkpoint(self.inner, start, use_reentrant=False).square().sum(), start)
        return x + self.inner(x) + 0.1 * slope


def test_a_backward_inside_a_covered_call_reads_nothing_when_it_has_ended():
    torch.manual_seed(0)
    model = nn.Sequential(*(Steered() for _ in range(LAYERS)))
    optimizer = sharded(model, 32 << 10)
    step(model, optimizer)
    model(torch.ones(2, WIDTH))
    assert not unwall.api.engine(model).backward._reads
