"""What cannot work on a sharded model is refused where it is written, and says what to write."""

import copy
import gc
from collections import defaultdict

import pytest
import torch
from reference import seeded
from torch import nn

import unwall
from unwall.plans import Plan

FP32 = Plan(compute_dtype=torch.float32)
HOST = Plan(compute_dtype=torch.float32, params="host", optimizer="host")


class Aliased(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if kind == "buffer":
            self.register_buffer("kept", self.first.weight.data)
        elif kind in ("parameter", "frozen"):
            self.second.weight.data = self.first.weight.data
            self.first.weight.requires_grad_(kind == "parameter")
        elif kind == "part":
            whole = torch.randn(8, 4)
            self.first.weight.data, self.second.weight.data = whole[:4], whole[4:]

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("buffer", "buffer kept shares its memory"),
        ("parameter", "share their memory"),
        ("frozen", "first.weight is frozen, and would not follow"),
    ],
)
def test_memory_that_two_tensors_of_a_model_share(kind, match):
    with pytest.raises(RuntimeError, match=match):
        unwall.shard(Aliased(kind), FP32)
    frozen = Aliased(kind).requires_grad_(False)
    unwall.shard(frozen, FP32)
    unwall.shard(Aliased("part"), FP32)


@pytest.mark.parametrize(
    "forget", [lambda o, _: o.state.clear(), lambda o, p: o.state.__delitem__(p), None], ids=["clear", "del", "set"]
)
def test_optimizer_states_are_not_forgotten_by_half(forget):
    model = unwall.shard(nn.Linear(4, 4), HOST)
    optimizer = unwall.AdamW(model.parameters())

    def step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    step()
    if forget is None:
        kept, optimizer.state = optimizer.state, defaultdict(dict)
        with pytest.raises(RuntimeError, match="To begin anew build another optimizer"):
            step()
        optimizer.state = kept
    else:
        with pytest.raises(RuntimeError, match="To begin anew build another optimizer"):
            forget(optimizer, model.weight)
    step()


def test_parameters_and_optimizers_that_outlive_their_model():
    model = unwall.shard(nn.Sequential(nn.Linear(4, 4)), HOST)
    optimizer, weight = unwall.AdamW(model.parameters()), model[0].weight
    del model  # it has never run: nothing in the background holds it
    gc.collect()
    for read in (lambda: weight.detach().sum(), lambda: weight.data):
        with pytest.raises(RuntimeError, match="outlives the sharded model"):
            read()
    with pytest.raises(RuntimeError, match="this optimizer updates is gone"):
        optimizer.step()


def test_a_step_inside_backward_names_the_way():
    model = unwall.shard(seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), HOST)
    optimizer = unwall.AdamW(model.parameters())
    handle = model[1].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match="update_in_backward=True"):
        model(torch.ones(2, 4)).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_recording_a_model_is_refused_by_name():
    model = unwall.shard(nn.Sequential(nn.Linear(4, 4)), HOST)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace of a sharded model"):
        torch.jit.trace(model, torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script of a sharded model"):
        torch.jit.script(model)
    model(torch.ones(2, 4))


def test_parameters_of_other_kinds():
    model = nn.Linear(4, 4)
    model.mask = nn.Parameter(torch.eye(4) > 0, requires_grad=False)
    unwall.shard(model, HOST)
    assert torch.equal(model.mask, torch.eye(4) > 0)
    model.load_state_dict(model.state_dict())
    assert torch.equal(model.mask, torch.eye(4) > 0)
    model = nn.Linear(4, 4)
    model.sparse = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(ValueError, match=r"parameter sparse is torch\.sparse_coo, expected a dense one"):
        unwall.shard(model, FP32)


def test_numbers_of_an_optimizer_are_copied_like_any_dict():
    model = unwall.shard(nn.Linear(4, 4), HOST)
    optimizer = unwall.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for copied in (optimizer.state.copy(), copy.copy(optimizer.state), optimizer.state | {}):
        assert [dict(entry) for entry in copied.values()] == [{"step": 1}] * 2


def test_states_of_a_model_that_is_gone_are_refused_in_words():
    optimizer = unwall.AdamW(unwall.shard(nn.Linear(4, 4), HOST).parameters())
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone, and its values with it"):
        optimizer.state_dict()
