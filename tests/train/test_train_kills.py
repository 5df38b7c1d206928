"""Drills: real processes of ``unwall train`` that are killed, and go on."""

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from train_tools import command, environment, losses, make_jsonl, make_model, make_plan, run_process

MANY, MORE = 5_000, 6
"""Steps of a run that does not come to its end before it is killed, and those of its end."""
LIMIT_S = 400.0
pytestmark = [pytest.mark.drill, pytest.mark.timeout(1500)]


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
    rate = {"lr": "1e-3", "schedule": "constant", "warmup": 0}  # the same in each step, however many there are
    return paths | {"seq": 48, "batch": 4, "steps": MANY, "save_every": 4} | rate | more


@pytest.fixture(autouse=True)
def none_is_left():
    """A run that a failed test has not ended would disturb the others for long."""
    yield
    while running:
        running.pop().kill()


running = []


def started(taken, /, **given):
    """A run that has taken some steps since it began, or began again: from then on it minds signals."""
    log, until = given["out"] / "log.jsonl", time.monotonic() + LIMIT_S
    starts = kinds_in(log).count("start")
    said = given["out"].with_suffix(".said")
    with said.open("w") as out:
        process = subprocess.Popen(command(**given), env=environment(), stdout=out, stderr=out)
    running.append(process)
    while True:
        kinds = kinds_in(log)
        if kinds.count("start") > starts and kinds[::-1].index("start") >= taken:
            return process
        assert process.poll() is None, f"ended with {process.returncode}: {said.read_text()[-2000:]}"
        assert time.monotonic() < until, said.read_text()[-2000:]
        time.sleep(0.02)


def kinds_in(log):
    """Of whole lines."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line)["kind"] for line in lines if line.endswith("\n")]


def generates(folder):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = transformers.AutoTokenizer.from_pretrained(folder)("the", return_tensors="pt")
    return model.generate(**asked, max_new_tokens=3, do_sample=False).shape[1] > 3


@pytest.mark.parametrize(("kind", "tier", "ranks"), [("llama", "disk", 2), ("qwen3_moe", "host", 1)])
def test_a_killed_run_ends_as_if_nothing_had_happened(place, kind, tier, ranks):
    out = f"killed-{kind}"
    given = options(place, out, kind, tier) | ({"nproc": ranks} if ranks > 1 else {})
    process = started(10, **given)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process = started(6, **given)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    reached = len(losses(place / out))
    steps = reached + MORE
    again = run_process(**given | {"steps": steps}, limit_s=LIMIT_S)
    assert again.returncode == 0, again.stderr
    assert f"goes on behind step {reached} of {steps}" in again.stdout
    whole = run_process(**options(place, f"whole-{kind}", kind, "device", steps=steps), limit_s=LIMIT_S)
    assert whole.returncode == 0, whole.stderr
    assert losses(place / out) == pytest.approx(losses(place / f"whole-{kind}"), rel=1e-4)
    assert generates(place / out)


def test_a_killed_command_takes_its_processes_along(place):
    process = started(2, **options(place, "orphans", "llama", "host", nproc=2))
    children = [child.pid for child in psutil.Process(process.pid).children()]
    assert len(children) == 2
    process.kill()
    process.wait()
    until = time.monotonic() + LIMIT_S
    while any(alive(pid) for pid in children):
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
