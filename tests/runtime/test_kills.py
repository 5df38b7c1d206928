"""A training with its states on disk is killed again and again in the same folder. The next one starts as in an empty folder."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import unwall

STEPS, MANY = 6, 100_000
"""Of a training that comes to its end, and of one that is killed before."""
TRAIN = """
import hashlib, sys
import torch
import unwall

folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])
unwall.shard(model, unwall.Plan(params="disk", grads="disk", optimizer="disk", disk=folder))
optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
for step in range(steps):
    for _ in range(2):  # a kill is as likely in a backward that adds up as in one that does not
        model(torch.randn(4, 128)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, flush=True)
digest = hashlib.sha256()
for value in model.state_dict().values():
    digest.update(value.float().numpy().tobytes())
print("result", digest.hexdigest(), flush=True)
"""


def start(folder, steps):
    """The training, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(Path(unwall.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", TRAIN, str(folder), str(steps)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def result(folder):
    shown, _ = start(folder, STEPS).communicate(timeout=600)
    return shown.splitlines()[-1]


def kill_after(folder, lines):
    """Kills the training in the step that follows its ``lines``-th line; True if it left files behind."""
    process = start(folder, MANY)
    try:
        for _ in range(lines):
            assert process.stdout.readline().startswith("step")
    finally:
        process.kill()
        process.communicate()
    return any(Path(folder).iterdir())


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_killed_training_leaves_nothing_that_the_next_one_minds(tmp_path):
    rng = random.Random(0)
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    expected = result(tmp_path / "calm")
    assert expected.startswith("result")
    left = [kill_after(tmp_path / "killed", rng.randrange(1, STEPS)) for _ in range(5)]
    assert all(left)
    assert result(tmp_path / "killed") == expected
    assert list((tmp_path / "killed").iterdir()) == []
