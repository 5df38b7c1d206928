"""Drill: the cable between two machines is cut in the middle of training. Nothing is closed, nobody says anything; every rank
ends with an error that names the rank at the other end, in each dimension.

The machines are network namespaces of this one, with names of their own. Each has one rank of each of three jobs.
"""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from namespaces import ip, two_nodes
from parallel_tools import mesh_of
from test_parallel_kills import READY_STEPS, trainer

from unwall.shards.lines import lines

DIMENSIONS = ("dp", "tp", "pp")
START_LIMIT_S, LIMIT_S = 400.0, 300.0
"""Far beyond what the ranks need, far below the hour after which gloo gives up."""


def work(node: int, dimension: str, folder: Path) -> None:
    """One rank of one job."""
    with (folder / f"{dimension}-{node}").open("w") as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    try:
        address = f"tcp://10.231.7.1:{29501 + DIMENSIONS.index(dimension)}"
        dist.init_process_group("gloo", init_method=address, rank=node, world_size=2, timeout=timedelta(hours=1))
        step, number = trainer(mesh_of(**{dimension: 2}), False), 0
        until = time.monotonic() + START_LIMIT_S + LIMIT_S
        while time.monotonic() < until:  # not for ever: the test may have been killed
            step(number % 5)
            number += 1
            if number >= READY_STEPS and lines.machines:
                (folder / f"ready-{dimension}-{node}").touch()
            time.sleep(0.05)  # for the other ranks of this machine
        raise TimeoutError("the cable was not cut")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def live(node: int, folder: Path) -> None:
    """A machine: a process for each job."""
    import torch.distributed.tensor.parallel  # once, for all of them

    torch.set_num_threads(1)
    children = []
    for dimension in DIMENSIONS:
        child = os.fork()
        if child == 0:
            work(node, dimension, folder)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def start(name: str, node: int, folder: Path) -> "subprocess.Popen[bytes]":
    here = Path(__file__).resolve()
    paths = [here.parents[2] / "src", here.parent, here.parents[1] / "support", os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
    inside = f"hostname node{node} && exec {sys.executable} {here} {node} {folder}"
    command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", inside]
    with (folder / f"node-{node}").open("w") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out)


@pytest.mark.drill
def test_a_machine_that_vanishes_is_named_in_every_dimension(tmp_path):
    with two_nodes() as names:
        machines = [start(name, node, tmp_path) for node, name in enumerate(names)]
        try:
            ready = [tmp_path / f"ready-{dimension}-{node}" for dimension in DIMENSIONS for node in range(2)]
            until = time.monotonic() + START_LIMIT_S
            while not all(path.exists() for path in ready):
                texts = [path.read_text()[-1500:] for path in tmp_path.glob("*-[01]") if not path.name.startswith("ready")]
                waits = time.monotonic() < until and all(machine.poll() is None for machine in machines)
                assert waits, "the ranks did not come to train:\n" + "\n".join(texts)
                time.sleep(0.1)
            ip("-n", names[1], "link", "set", "cable", "down")
            for machine in machines:
                machine.wait(timeout=LIMIT_S)
        finally:
            for machine in machines:
                ranks = psutil.Process(machine.pid).children() if machine.poll() is None else []
                for process in (machine, *ranks):  # first the one that could start others
                    process.kill()
                machine.wait()
    for dimension in DIMENSIONS:
        for node in range(2):
            said = (tmp_path / f"{dimension}-{node}").read_text()
            gone = 1 - node
            where = "dimension 'dp' of the mesh" if dimension == "dp" else f"the mesh ({dimension} {gone})"
            wanted = f"rank {gone} of {where} has vanished: its machine (node{gone}) does not answer any more"
            assert wanted in said, f"rank {node} said: {said}"


if __name__ == "__main__":
    live(int(sys.argv[1]), Path(sys.argv[2]))
