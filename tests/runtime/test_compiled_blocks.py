"""Blocks that the user has compiled: the values of plain PyTorch wherever the states live, and nothing compiled again."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import unwall
from unwall.runtime.recompute import recompute_blocks

WIDTH = 32


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)))


def step(model, optimizer):
    loss = model(torch.full((2, WIDTH), 0.5)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def compilations():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_no_step_compiles_again(tier, tmp_path):
    torch._dynamo.reset()
    plain, model = build(), build()
    for block in model:
        block.compile(backend="eager")
    tiers = {} if tier == "device" else {"params": tier, "optimizer": tier, "device_bytes": "192KiB", "disk": tmp_path}
    unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, **tiers))
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    before, known = compilations(), []
    for _ in range(4):
        assert step(model, optimizer) == pytest.approx(step(plain, reference), rel=1e-5)
        known.append(compilations())
    assert before < known[1] == known[-1]


class Counting(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", count)

    def forward(self, x):
        if self.count is None:
            return torch.tanh(self.inner(x))
        self.count += 1
        return torch.tanh(self.inner(x * self.count.clone()))


def test_a_model_is_compiled_around_recomputed_blocks():
    """Dynamo follows the checkpoint, of a block with buffers and of one without."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(Counting(torch.zeros(())), Counting(None))
    model = copy.deepcopy(plain)
    recompute_blocks(model)
    compiled = torch.compile(model, backend="eager")
    for run in (plain, compiled):
        run(torch.full((2, WIDTH), 0.5)).square().mean().backward()
    torch._dynamo.reset()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)


def test_a_layer_that_dynamo_skips_saves_its_tensors_as_they_are():
    """Once a plain layer was compiled, Dynamo runs the forward of its class as it is, and looks at what is called below."""
    torch._dynamo.reset()
    plain, model = build(), build()
    for run in (plain, model):
        run[1][2].compile(backend="aot_eager")
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = [step(plain, reference) for _ in range(3)]
    unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    assert [step(model, optimizer) for _ in range(3)] == pytest.approx(expected, rel=1e-5)
    torch._dynamo.reset()
