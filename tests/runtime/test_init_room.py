"""What ``unwall.init`` holds for ``shard`` is not counted as taken: it is given back as the states take it."""

import pytest
import torch
from torch import nn

import unwall
from unwall.runtime import init, resources

WIDTH, LAYERS = 256, 8
WEIGHTS = LAYERS * WIDTH * WIDTH * 4


class Layers(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def test_what_init_holds_counts_as_room(monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "HOST_SHARE", 1.0)
    monkeypatch.setattr(init, "RESIDENT_BYTES", 0)
    plan = unwall.Plan(params="host", optimizer="host", disk=str(tmp_path), compute_dtype=torch.float32)
    needed = 4 * WEIGHTS  # weights, gradients and two moments
    monkeypatch.setattr(resources, "available_bytes", lambda: needed - WEIGHTS // 2)
    with pytest.raises(unwall.PlanError, match="host_bytes is"):
        unwall.shard(Layers(), plan)
    with unwall.init(plan):
        model = Layers()
    held = init.paged_bytes(model)
    assert WEIGHTS * (LAYERS - 2) // LAYERS <= held <= WEIGHTS
    unwall.shard(model, plan)
    assert init.paged_bytes(model) == 0
