"""Drills: real processes of ``unwall train`` that are killed, and go on."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from train_tools import command, environment, losses, make_jsonl, make_model, make_plan, run_process

STEPS = 30
LIMIT_S = 600.0
pytestmark = pytest.mark.drill


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("kills")
    for kind in ("llama", "qwen3_moe"):
        make_model(root / kind, kind)
    make_jsonl(root / "data.jsonl")
    for tier in ("device", "host", "disk"):
        make_plan(root / f"{tier}.toml", tier, root / "disk")
    return root


def options(place, out, kind, tier, **more):
    paths = {"model": place / kind, "data": place / "data.jsonl", "out": place / out, "plan": place / f"{tier}.toml"}
    return paths | {"seq": 48, "batch": 4, "lr": "1e-2", "steps": STEPS, "save_every": 4} | more


def started(step, **given):
    """A run that has logged a step."""
    process = subprocess.Popen(command(**given), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, until = given["out"] / "log.jsonl", time.monotonic() + LIMIT_S
    while not log.exists() or log.read_bytes().count(b'"kind": "step"') < step:
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def generates(folder):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = transformers.AutoTokenizer.from_pretrained(folder)("the", return_tensors="pt")
    return model.generate(**asked, max_new_tokens=3, do_sample=False).shape[1] > 3


@pytest.mark.parametrize(("kind", "tier", "ranks"), [("llama", "disk", 2), ("qwen3_moe", "host", 1)])
def test_a_killed_run_ends_as_if_nothing_had_happened(place, kind, tier, ranks):
    whole = run_process(**options(place, f"whole-{kind}", kind, "device"))
    assert whole.returncode == 0, whole.stderr
    out = f"killed-{kind}"
    given = options(place, out, kind, tier) | ({"nproc": ranks} if ranks > 1 else {})
    process = started(10, **given)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process = started(18, **given)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    reached = len(losses(place / out))
    again = run_process(**given)
    assert again.returncode == 0, again.stderr
    assert reached >= STEPS or f"goes on behind step {reached} of {STEPS}" in again.stdout
    assert losses(place / out) == pytest.approx(losses(place / f"whole-{kind}"), rel=1e-4)
    assert generates(place / out)


def test_a_killed_command_takes_its_processes_along(place):
    process = started(2, **options(place, "orphans", "llama", "host", nproc=2, steps=100000))
    children = [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]
    assert len(children) == 2
    process.kill()
    process.wait()
    until = time.monotonic() + 30
    while any(alive(pid) for pid in children):
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
