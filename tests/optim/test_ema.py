"""unwall.ema: a sharded average on any tier, against the same average of plain tensors."""

import tempfile

import pytest
import torch
from ranks import rank_and_world
from torch import nn

import unwall


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))


def shard(model, tier, dtype, stage=3):
    tiers = {} if tier == "device" else {"params": tier, "optimizer": tier}
    if tier == "disk":
        tiers["disk"] = tempfile.mkdtemp()
    return unwall.shard(model, unwall.Plan(compute_dtype=dtype, stage=stage, **tiers))


def whole(model):
    with unwall.full_params(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def run(tier, dtype, stage=3):
    model = shard(build(), tier, dtype, stage)
    optimizer, average = unwall.AdamW(model.parameters(), lr=1e-2), unwall.ema(model, 0.8)
    expected, x = whole(model), torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        for name, value in whole(model).items():
            expected[name].lerp_(value, 1.0 - 0.8)
    trained, output = whole(model), model(x).detach()
    with average.swap():
        swapped, inside = whole(model), model(x).detach()
    state, again = average.state_dict(), unwall.ema(model, 0.5)
    again.load_state_dict(state)
    with again.swap():
        loaded = whole(model)
    assert (again.decay, again.updates) == (0.8, 3)
    assert all(torch.equal(value, trained[name]) for name, value in whole(model).items())
    assert torch.equal(model(x).detach(), output)
    assert not torch.equal(inside, output)
    assert bool(state["params"]) == (rank_and_world()[0] == 0)
    return expected, swapped, loaded, state["params"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_that_of_plain_tensors(ranks, world, dtype):
    for tier, stage in (("device", 3), ("host", 3), ("disk", 3), ("device", 0), ("device", 2))[: 3 if world == 1 else 5]:
        for rank, (expected, swapped, loaded, params) in enumerate(ranks(world).run(run, tier, dtype, stage)):
            torch.testing.assert_close(swapped, expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(loaded, swapped, rtol=0, atol=0)
            if rank == 0:
                torch.testing.assert_close(params, swapped, rtol=0, atol=0)


def test_bad_input():
    model = build()
    with pytest.raises(RuntimeError, match="not sharded"):
        unwall.ema(model)
    shard(model, "host", torch.float32)
    with pytest.raises(ValueError, match="decay"):
        unwall.ema(model, 1.5)
    average = unwall.ema(model)
    state = average.state_dict()
    state["params"]["0.bias"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"0\.bias has shape"):
        average.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"inside ema\.swap"), average.swap(), torch.no_grad():
        model[0].weight.zero_()
