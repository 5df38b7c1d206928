"""Activations as the planner counts them: against the engine's own census, and as choices."""

import dataclasses

import pytest
import torch
from planner_tools import MACHINE, decoder
from torch import nn
from torch.nn import functional as F

import unwall
from unwall.planner.activations import activations_of, blocks_of, flops_of, words
from unwall.planner.candidates import KEPT
from unwall.planner.choose import choose
from unwall.planner.description import from_module, from_shape
from unwall.planner.job import make_job
from unwall.planner.memory import terms_of
from unwall.planner.outline import skeleton
from unwall.planner.pace import pace_of
from unwall.planner.predict import predict
from unwall.planner.workload import Workload
from unwall.plans import Plan
from unwall.runtime.hooks import engine_of

MIB = 1 << 20


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    """A transformer block as they are: norms, attention over pairs of heads, an MLP."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), Mlp(width)

    def forward(self, x):
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    def __init__(self, width=64, layers=3):
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, width), nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_predicted_bytes_are_those_that_the_engine_counts():
    """Within 10%: biases, statistics of norms and of attention are not counted."""
    torch.manual_seed(0)
    model, load = Model(), Workload(batch=2, seq=64, item_bytes=4, activations="keep")
    predicted = blocks_of(from_module(model), load)
    unwall.shard(model, Plan(device_bytes="64MiB", compute_dtype=torch.float32))
    for _ in range(3):
        model(torch.zeros(2, 64, dtype=torch.long)).sum().backward()
    measured = engine_of(model).activations.blocks
    assert len(predicted) == len(measured) == 3
    for guess, found in zip(predicted, measured, strict=True):
        assert guess.kept_bytes == pytest.approx(found.kept_bytes, rel=0.1)
        assert guess.input_bytes == found.input_bytes


def test_activations_by_hand():
    described, load = from_shape("3x64x2", vocab=100), Workload(batch=2, seq=10, activations="keep")
    block, head = 2 * 20 * (16 * 64 + 2 * 2 * 10), 2 * 20 * 164
    found = {
        kind: activations_of(described, dataclasses.replace(load, activations=kind)) for kind in ("keep", "recompute", "host")
    }
    assert found["keep"].device_bytes == 3 * block + head
    assert found["recompute"].device_bytes == 2 * 2 * 20 * 64 + block
    assert (found["host"].device_bytes, found["host"].host_bytes) == (block, 3 * 2 * 20 * 64)
    assert [each.host_bytes for each in found.values()] == [0, 0, 3 * 2 * 20 * 64]
    cut = activations_of(described, dataclasses.replace(load, sequence_tiles=4))
    assert cut.device_bytes == 3 * (block - 2 * 20 * 8 * 64) + max(head, 2 * 20 * 8 * 64 // 4)
    assert (
        flops_of(described, dataclasses.replace(load, sequence_tiles=4), cut) == described.flops(2, 10) + 3 * 40 * 8 * 64 * 64
    )
    assert flops_of(described, load, found["recompute"]) == described.flops(2, 10, recompute=True)


def test_auto_is_decided_by_the_room_and_never_worse_than_its_parts():
    outline, pace = decoder(width=64, layers=6), pace_of(MACHINE, torch.bfloat16)
    load = Workload(batch=8, seq=256, activations="keep")
    most, least = (
        activations_of(outline.description, dataclasses.replace(load, activations=kind)) for kind in ("keep", "recompute")
    )
    steps = []
    for part in (1.0, 0.8, 0.6, 0.4, 0.2):
        room = int(least.device_bytes + part * (most.device_bytes - least.device_bytes)) + 7 * MIB
        times = {}
        for kind in ("keep", "recompute", "host", "auto"):
            plan = Plan(params="device", optimizer="device", activations=kind, device_bytes=room)
            job = make_job(outline, plan, 1, dataclasses.replace(load, activations=kind), room, 1 << 30, pace)
            if sum(terms_of(job)["device"].values()) <= room:
                times[kind] = predict(job, MACHINE).step_s
        assert times["auto"] <= 1.0001 * min(times.values())
        steps.append(times["auto"])
    assert steps == sorted(steps)  # less room is never faster
    assert steps[0] < steps[-1]


def test_more_memory_is_never_slower():
    outline, steps = decoder(width=256, layers=4), []
    for budget in (16, 24, 40, 64, 128, 512):
        found = choose(outline, MACHINE, batch=16, seq=512, device_bytes=budget * MIB)
        assert found.prediction.tier_bytes("device") <= budget * MIB
        steps.append(found.prediction.step_s)
    for more, less in zip(steps[1:], steps, strict=False):
        assert more <= 1.01 * less  # plans within 1% count as equally fast


def test_a_plan_carries_what_was_chosen_and_says_why():
    outline = decoder(width=256, layers=8)
    tight = choose(outline, dataclasses.replace(MACHINE, device_bytes=130 * MIB), batch=8, seq=1024, compare=True)
    assert tight.activations == tight.workload.activations
    rows = {row.activations: row for row in tight.kept_otherwise}
    assert set(rows) == {*KEPT, "host"}
    assert rows["keep"].device_bytes > rows["recompute"].device_bytes > rows["host"].device_bytes
    assert rows["host"].host_bytes > 0
    predicted = [row.step_s for row in rows.values() if row.step_s is not None]
    assert min(predicted) >= 0.99 * tight.prediction.step_s


def test_sequence_tiles_where_one_sample_does_not_fit_otherwise():
    outline = skeleton(from_shape("2x256x1"))
    small = dataclasses.replace(MACHINE, device_bytes=34 * MIB)
    found = choose(outline, small, seq=2048, kept=("host",))
    assert found.sequence_tiles == found.workload.sequence_tiles > 1
    assert "sequence tiles" in str(found)


def test_words():
    found = activations_of(from_shape("3x64"), Workload(activations="host"))
    assert words(found) == "recomputed from inputs on the host"
    assert words(dataclasses.replace(found, choices=("recompute", "keep", "keep"))) == "2 of 3 blocks kept, 1 recomputed"
