"""Drill: two nodes as network namespaces of this machine, under torchrun. One dies and comes back.

What is asserted: the other node's rank ends with a named error soon, torchrun brings the job back on one node and then on two,
and the losses are those of an undisturbed run.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import two_nodes
from train_tools import environment, losses, make_jsonl, make_model, make_plan, run_process

STEPS, LIMIT_S = 100_000, 400.0
pytestmark = [pytest.mark.drill, pytest.mark.timeout(1500)]


@pytest.fixture
def nodes():
    with two_nodes() as names:
        yield names


@pytest.fixture
def place(tmp_path):
    make_model(tmp_path / "model")
    make_jsonl(tmp_path / "data.jsonl")
    make_plan(tmp_path / "plan.toml", "host")
    return tmp_path


def options(place, out, steps):
    paths = {"model": place / "model", "data": place / "data.jsonl", "out": place / out, "plan": place / "plan.toml"}
    return paths | {"seq": 48, "batch": 2, "lr": "1e-3", "schedule": "constant", "warmup": 0, "steps": steps, "save_every": 10}


class Node:
    """One node's torchrun, in a process group of its own."""

    def __init__(self, place, name, number):
        train = [
            part for key, value in options(place, "out", STEPS).items() for part in (f"--{key.replace('_', '-')}", str(value))
        ]
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.231.7.1:29401", "--rdzv-id", "drill",
            "--rdzv-conf", f"last_call_timeout=3,join_timeout=200,is_host={int(number == 0)}", "--local-addr", f"10.231.7.{number + 1}",
            "--monitor-interval", "0.2", "-m", "unwall", "train", *train,
        ]  # fmt: skip
        self.output = place / f"node{number}-{time.monotonic_ns()}.txt"
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", name, *launcher], stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment(GLOO_SOCKET_IFNAME="cable", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
            )  # fmt: skip

    def kill(self):
        """Everything on the node, at once."""
        namespace = os.stat(f"/proc/{self.process.pid}/ns/net").st_ino
        mine = os.stat("/proc/self/ns/net").st_ino
        assert namespace != mine
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.stat(entry / "ns/net").st_ino == namespace:
                        os.kill(int(entry.name), signal.SIGKILL)
        self.process.wait()

    def read(self):
        return self.output.read_text(errors="replace")


def wait_for(what, condition, nodes, limit_s=LIMIT_S):
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"{what} did not happen:\n" + "\n---\n".join(node.read()[-3000:] for node in nodes))
        time.sleep(0.1)


def ranks_and_steps(place):
    """Ranks of the run as it is now, and steps in its log."""
    try:
        found = re.search(r'"ranks": (\d+)', (place / "out" / "run.json").read_text())
        steps = (place / "out" / "log.jsonl").read_bytes().count(b'"kind": "step"')
    except FileNotFoundError:
        return 0, 0
    return (int(found[1]) if found else 0), steps


def test_a_node_dies_and_comes_back(place, nodes):
    first, second = Node(place, nodes[0], 0), Node(place, nodes[1], 1)
    living = [first, second]
    try:
        wait_for("25 steps on two nodes", lambda: ranks_and_steps(place) >= (2, 25), living)
        second.kill()
        wait_for("a named error", lambda: re.search(r"unwall: .*rank 1", first.read()), [first], limit_s=120)
        wait_for("the job on one node", lambda: ranks_and_steps(place)[0] == 1, [first])
        before = ranks_and_steps(place)[1]
        wait_for("ten steps on one node", lambda: ranks_and_steps(place)[1] >= before + 10, [first])
        living.append(Node(place, nodes[1], 1))
        wait_for("the job on two nodes", lambda: ranks_and_steps(place)[0] == 2, [first, living[-1]])
        before = ranks_and_steps(place)[1]
        wait_for("ten more steps", lambda: ranks_and_steps(place)[1] >= before + 10, [first, living[-1]])
    finally:
        for node in living:
            if node.process.poll() is None:
                node.kill()
    found = losses(place / "out")
    plain = run_process(**options(place, "plain", len(found)), limit_s=LIMIT_S)
    assert plain.returncode == 0, plain.stderr
    assert found == pytest.approx(losses(place / "plain"), rel=1e-3)
