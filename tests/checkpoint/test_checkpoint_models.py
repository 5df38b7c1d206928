"""Checkpoints of real models with tied, fused and stacked weights, and of a wrapped optimizer: loaded, and exported offline."""

import pytest
import torch
from hub_models import KINDS, loss_of, tiny
from safetensors.torch import load_file

import unwall
from unwall.checkpoint.offline import export_checkpoint

HOST = unwall.Plan(params="host", optimizer="host", compute_dtype=torch.float32)


def stepped(kind, model, optimizer, steps):
    for _ in range(steps):
        torch.manual_seed(1)  # some have dropout
        loss_of(model.train(), kind).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_on_elsewhere_and_is_exported_offline(tmp_path, kind):
    model = unwall.shard(tiny(kind), unwall.Plan(compute_dtype=torch.float32))
    optimizer = unwall.wrap(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    stepped(kind, model, optimizer, 1)
    path = unwall.save(tmp_path / "saved", model, optimizer)
    unwall.export_weights(model, tmp_path / "live")
    export_checkpoint(path, tmp_path / "offline")
    live, offline = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "offline"))
    assert live.keys() == offline.keys()
    assert all(torch.equal(live[name], offline[name]) for name in live)

    other = unwall.shard(tiny(kind), HOST)
    its = unwall.wrap(torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.1))
    unwall.load(path, other, its)
    for trained, by in ((model, optimizer), (other, its)):
        stepped(kind, trained, by, 1)
    found, wanted = other.state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
