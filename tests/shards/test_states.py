"""States as data: what they take, and whose they are."""

import pytest
import torch
from torch import nn

import unwall
from unwall.optim.rule import Span
from unwall.plans import Plan
from unwall.shards.states import (
    GRAD,
    GROUP,
    PARAM,
    StateKey,
    StateSpec,
    adamw_specs,
    bytes_per_element,
    master_specs,
    update_bytes,
)

TRAFFIC = {torch.bfloat16: 26, torch.float16: 28, torch.float32: 28, torch.float64: 56}


@pytest.mark.parametrize("dtype", TRAFFIC)
def test_the_traffic_of_an_update_follows_from_the_specifications(dtype):
    assert update_bytes(dtype) == TRAFFIC[dtype]
    tensors = {spec.key(1): torch.zeros(10, dtype=spec.dtype) for spec in adamw_specs(dtype)}
    tensors |= {spec.key(): torch.zeros(10, dtype=spec.dtype) for spec in master_specs(dtype)}
    span = Span.of({**tensors, PARAM: torch.zeros(10, dtype=dtype), GRAD: torch.zeros(10, dtype=dtype)}, None)
    assert span.traffic_bytes == 10 * TRAFFIC[dtype]
    assert list(span.states) == ["exp_avg", "exp_avg_sq"]


def test_what_states_take():
    assert [bytes_per_element(adamw_specs(dtype)) for dtype in TRAFFIC] == [8, 8, 8, 16]
    assert [bytes_per_element(master_specs(dtype)) for dtype in TRAFFIC] == [2, 4, 0, 0]
    assert StateSpec("momentum", torch.float32).nbytes(1000) == 4000


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_state_begins_with_its_initial_value(tier, tmp_path):
    model = nn.Linear(40, 40)
    unwall.shard(model, Plan(params=tier, optimizer=tier, disk=tmp_path))
    group = unwall.api.engine(model).groups[0]
    assert set(group.state(StateSpec("accumulator", torch.float32, initial=0.5), owner=7, write=False).tolist()) == {0.5}
    assert group.states[StateKey(7, "accumulator")].tier == tier


def test_two_optimizers_have_states_of_the_same_name():
    model = nn.Linear(40, 40)
    unwall.shard(model)
    first, second = unwall.AdamW(model.parameters()), unwall.AdamW(model.parameters())
    keys = unwall.api.engine(model).groups[0].states
    assert {key.owner for key in keys if key.name == "exp_avg"} == {first.own.owner, second.own.owner}
    assert GROUP not in (first.own.owner, second.own.owner)
