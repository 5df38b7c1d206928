"""What is told twice is updated once, and a step that failed is tried again as it was."""

import pytest
import torch
from torch import nn

import unwall
from unwall.optim import sharded
from unwall.plans import Plan

HOST, DEVICE = {"params": "host", "optimizer": "host"}, {"params": "device", "optimizer": "device"}


def start(plan, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    unwall.shard(model, Plan(compute_dtype=torch.float32, **plan))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, **options)


def differing(first, second):
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def test_a_gradient_forgotten_on_its_way_is_not_updated_with_twice():
    def run(plan, forgotten, **options):
        model, optimizer = start(plan, **options)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        if forgotten:
            model(x)
            model[4](x).sum().backward()  # reaches the last layer only
            model.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return model.state_dict()

    assert differing(run(DEVICE, False), run(HOST, True, update_in_backward=True)) == []


def test_a_step_that_failed_clips_when_it_is_tried_again(monkeypatch):
    def run(fails):
        model, optimizer = start(HOST)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
        (1000 * model(x).square().mean()).backward()
        optimizer.clip_grad_norm_(0.1)
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(sharded, "settle", lambda group: (_ for _ in ()).throw(OSError("a drive that failed")))
                with pytest.raises(OSError, match="a drive that failed"):
                    optimizer.step()
        optimizer.step()
        model(x).square().mean().backward()
        optimizer.step()  # the clip was for one step
        return {**model.state_dict(), **{f"m{n}": entry["exp_avg"] for n, entry in optimizer.state_dict()["state"].items()}}

    assert differing(run(fails=False), run(fails=True)) == []
