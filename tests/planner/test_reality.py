"""Predicted peaks beside the engine's own account, on a small model; bench/prediction.py does the same for 50M parameters."""

import pytest
import torch
from planner_tools import MACHINE, Decoder
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.planner.job import Workload, make_job
from unwall.planner.outline import outline_of
from unwall.planner.predict import predict
from unwall.plans import Plan

HOST, DISK = {"params": "host", "optimizer": "host"}, {"params": "disk", "grads": "disk", "optimizer": "disk"}
WITHIN = 0.05


class Recomputed(Decoder):
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def peaks(fields, passes, recompute, clip=True, at_once=False):
    """(predicted, measured) by tier. Where clipping is active no update runs ahead of the step. ``at_once``: all run in
    backward."""
    plan = Plan(**fields)
    model = (Recomputed if recompute else Decoder)(width=128, layers=4, vocab=512)
    kept = "recompute" if recompute else "keep"
    workload = Workload(batch=1, seq=8, passes=passes, activations=kept, clip=clip, update_in_backward=at_once)
    job = make_job(outline_of(model), plan, 1, workload, plan.budget_device_bytes, plan.budget_host_bytes)
    predicted = predict(job, MACHINE).peak_bytes
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), max_grad_norm=1e-3 if clip else None, update_in_backward=at_once)
    for step in range(3):
        if step == 2:
            unwall.stats(model).reset()
        for _ in range(passes):
            model(torch.arange(8)[None]).float().square().sum().backward()
        optimizer.step()
    return predicted, {tier: found.peak_bytes for tier, found in unwall.stats(model).tiers.items()}


@pytest.mark.parametrize(
    ("fields", "passes", "recompute"),
    [
        ({}, 1, False),
        ({}, 3, True),
        ({"compute_dtype": torch.float32}, 3, False),
        ({"device_bytes": "8MiB"}, 1, True),
        (HOST, 1, False),
        (HOST, 3, False),
        (HOST | {"device_bytes": "2MiB"}, 1, True),
        (HOST | {"device_bytes": "2MiB"}, 3, False),
        ({"params": "device", "optimizer": "host"}, 1, True),
        ({"params": "host", "optimizer": "disk"}, 1, False),
        (DISK, 1, True),
        (DISK, 3, False),
    ],
    ids=str,
)
def test_peak_bytes_are_those_of_the_engine(fields, passes, recompute, tmp_path):
    given = fields | ({"disk": tmp_path} if "disk" in fields.values() else {})
    predicted, measured = peaks(given, passes, recompute)
    for tier, nbytes in measured.items():
        assert predicted[tier] == pytest.approx(nbytes, rel=WITHIN), tier


def test_peak_bytes_with_updates_ahead_of_the_step():
    predicted, measured = peaks(HOST, 1, False, clip=False)
    assert predicted["host"] == pytest.approx(measured["host"], rel=WITHIN)


@pytest.mark.parametrize(
    "fields", [{}, HOST, HOST | {"device_bytes": "2MiB"}, {"params": "host", "optimizer": "disk"}], ids=str
)
def test_peak_bytes_with_gradients_that_are_not_kept(fields, tmp_path):
    given = fields | {"grads": "transient"} | ({"disk": tmp_path} if "disk" in fields.values() else {})
    predicted, measured = peaks(given, 1, True, clip=False, at_once=True)
    for tier, nbytes in measured.items():
        assert predicted[tier] == pytest.approx(nbytes, rel=WITHIN), tier
