"""Parameters that a plan leaves alone, as the planner counts them."""

import pytest
import torch
from torch import nn

import unwall
from unwall.plans import PlanError


def model():
    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(8192, 1024), *(nn.Linear(1024, 1024) for _ in range(8)))


def table(name, _):
    return name == "0.weight"


def test_parameters_left_alone_are_whole_on_the_device_and_have_no_states():
    plain = unwall.plan(model(), batch=8, seq=16, hardware="rtx-4090")
    chosen = unwall.plan(model(), batch=8, seq=16, hardware="rtx-4090", ignore=table)
    assert chosen.ignore is table
    left = chosen.prediction.terms["device"]["parameters left alone, and their gradients"]
    assert left == 2 * 4 * 8192 * 1024  # fp32, value and gradient
    states = [sum(found.prediction.terms["device"].get(name, 0) for name in ("master", "moments")) for found in (plain, chosen)]
    assert states[0] - states[1] == 10 * 8192 * 1024


def test_ignore_needs_a_module():
    with pytest.raises(PlanError, match="give a module"):
        unwall.plan("2x64", batch=1, hardware="rtx-4090", ignore=table)
