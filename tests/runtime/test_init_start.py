"""What ``unwall.init`` does not do: copy what stays where it is, or read what is overwritten. And where initialisers run."""

import contextlib

import pytest
import torch
from torch import nn

import unwall
from unwall.runtime import init as init_module
from unwall.runtime.init import whole_value
from unwall.runtime.shelf import Shelved

NEEDS_CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


def layers(device=None):
    torch.manual_seed(0)
    with torch.device(device) if device else contextlib.nullcontext():
        made = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with torch.no_grad():
        for layer in made:  # as libraries do that initialise again, after construction
            layer.weight.normal_(std=0.02)
            layer.bias.zero_()
    return made


def same(model, plain):
    values = [whole_value(param) for param in model.parameters()]
    return all(torch.equal(value, param.cpu()) for value, param in zip(values, plain.parameters(), strict=True))


def test_a_rank_alone_copies_nothing(monkeypatch):
    monkeypatch.setattr(init_module, "RESIDENT_BYTES", 0)
    with unwall.init():
        model = layers()
        places = [param.data_ptr() for param in model.parameters()]
    assert model[0].weight.isnan().all()
    assert [whole_value(param).data_ptr() for param in model.parameters()] == places


def test_what_is_overwritten_is_not_read_and_survives_a_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(init_module, "RESIDENT_BYTES", 0)
    reads, get = [], Shelved.get
    monkeypatch.setattr(Shelved, "get", lambda shelved: reads.append(1) or get(shelved))
    with unwall.init(unwall.Plan(disk=tmp_path, host_bytes=1)):
        model = layers()
        assert not reads
        with pytest.raises(RuntimeError, match="std"), torch.no_grad():
            model[0].weight.normal_(std=-1.0)
        assert len(reads) == 1
        with torch.no_grad():
            model[1].weight[0].zero_()  # a part of it: the rest is read
        assert len(reads) == 2
    plain = layers()
    with torch.no_grad():
        plain[1].weight[0].zero_()
    assert same(model, plain)


def test_the_device_says_where_initialisers_run():
    with pytest.raises(ValueError, match=r"without unwall\.init"), unwall.init(device="meta"):
        pass
    with unwall.init(device="cpu"):
        model = layers()
    assert same(model, layers())


@pytest.mark.gpu
@NEEDS_CARD
@pytest.mark.parametrize("how", ["device", "context"])
def test_initialisers_on_the_accelerator_give_the_values_of_a_plain_build_there(how):
    with unwall.init(device="cuda" if how == "device" else None):
        model = layers(None if how == "device" else "cuda")
    assert model[0].weight.is_cuda
    values = [whole_value(param) for param in model.parameters()]
    assert all(value.device.type == "cpu" for value in values)
    assert all(torch.equal(value, param.cpu()) for value, param in zip(values, layers("cuda").parameters(), strict=True))


@pytest.mark.gpu
@NEEDS_CARD
def test_a_model_built_on_the_accelerator_trains():
    with unwall.init(device="cuda"):
        model = layers()
    unwall.shard(model, unwall.Plan(params="host", optimizer="host", compute_dtype=torch.float32))
    optimizer = unwall.AdamW(model.parameters(), lr=0.1)
    plain = layers("cuda")
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    data = torch.randn(4, 64, device="cuda")
    for each, steps in ((model, optimizer), (plain, reference)):
        each(data).square().mean().backward()
        steps.step()
        steps.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[name].cpu(), atol=1e-4, rtol=1e-4)
