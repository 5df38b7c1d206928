"""A rank is killed: every other one ends with an error that names it and the dimension, whoever it waited for."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel_tools import ADAMW, batch, build, loss_of, mesh_of, spread
from ranks import fork_context
from torch import nn

import unwall

LIMIT_S = 300.0
"""Far beyond what the ranks need, far below the hour after which gloo gives up."""
READY_STEPS = 2


def trainer(mesh, stays):
    """What runs one step on this rank. ``stays``: this rank does not come out of its third forward."""
    names, plan = mesh.mesh_dim_names, unwall.Plan(compute_dtype=torch.float32)
    replica = mesh.get_local_rank("dp") if "dp" in names else 0
    if "pp" not in names:
        model = unwall.shard(spread(build(), mesh["tp"], "plain") if "tp" in names else build(), plan, mesh)
        optimizer = unwall.AdamW(model.parameters(), **ADAMW)

        def step(number):
            if stays and number == READY_STEPS:
                model.blocks[0].register_forward_pre_hook(lambda *_: threading.Event().wait())
            tokens, target = batch(number, replica)
            loss_of(model(tokens), target).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step
    plain = build()
    layers = nn.Sequential(plain.embed, *plain.blocks, plain.norm, plain.head)
    part, schedule = unwall.pipeline(layers, plan, mesh=mesh, microbatches=4, loss=loss_of)
    its, stage = unwall.AdamW(part.parameters(), **ADAMW), mesh.get_local_rank("pp")

    def scheduled(number):
        tokens, target = batch(number, replica)
        last = stage == mesh["pp"].size() - 1
        schedule.step(*([tokens] if stage == 0 else []), **({"target": target, "losses": []} if last else {}))
        its.step()
        its.zero_grad()

    return scheduled


def serve(rank, sizes, folder, stays):
    """A rank's life, as a script under torchrun."""
    with Path(folder, f"said-{rank}").open("w") as said:
        os.dup2(said.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = torch.Size(sizes.values()).numel()
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(hours=1))
        step, number = trainer(mesh_of(**sizes), stays), 0
        while True:
            step(number % 5)
            number += 1
            if number == READY_STEPS:
                Path(folder, f"ready-{rank}").touch()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as the interpreter does it: multiprocessing would not
        sys.stderr.flush()
        os._exit(1)


def kill_one(sizes, victim, folder, stays=False):
    """What each of the others has said in the end, by rank. ``stays``: they wait for what never comes."""
    world, context = torch.Size(sizes.values()).numel(), fork_context()
    given = [(rank, sizes, str(folder), stays and rank != victim) for rank in range(world)]
    processes = [context.Process(target=serve, args=args, daemon=True) for args in given]
    try:
        for process in processes:
            process.start()
        until = time.monotonic() + LIMIT_S
        while not all((folder / f"ready-{rank}").exists() for rank in range(world)):
            assert time.monotonic() < until, "the ranks did not come to train"
            assert all(process.is_alive() for process in processes), (folder / "said-0").read_text()
            processes[0].join(timeout=0.1)
        os.kill(processes[victim].pid, signal.SIGKILL)
        until = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(timeout=max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in processes]
        said = {rank: (folder / f"said-{rank}").read_text() for rank in range(world) if rank != victim}
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert codes[victim] == -signal.SIGKILL
    for rank, text in said.items():
        assert codes[rank] not in (0, None), f"rank {rank} did not end, or as if nothing had happened: {text}"
    return said


@pytest.mark.drill
@pytest.mark.parametrize(
    ("sizes", "victim", "dimensions"),
    [
        ({"tp": 2}, 1, ["tp 1"]),
        ({"pp": 2}, 1, ["pp 1"]),
        ({"dp": 2}, 1, []),
        ({"dp": 2, "tp": 2}, 2, ["dp 1", "tp 0"]),
    ],
    ids=["tensor", "pipeline", "data", "data-and-tensor"],
)
def test_the_others_name_the_rank_that_was_killed(sizes, victim, dimensions, tmp_path):
    for rank, text in kill_one(sizes, victim, tmp_path).items():
        where = f"mesh ({', '.join(dimensions)})" if dimensions else "dimension 'dp' of the mesh"
        assert f"rank {victim} of {'the ' if dimensions else ''}{where} has ended" in text, f"rank {rank} said: {text}"


@pytest.mark.drill
def test_a_wait_that_no_exception_ends(tmp_path):
    said = kill_one({"tp": 2}, 1, tmp_path, stays=True)[0]
    assert "rank 0 of the mesh (tp 0) waits for another rank. rank 1 of the mesh (tp 1) has ended" in said
