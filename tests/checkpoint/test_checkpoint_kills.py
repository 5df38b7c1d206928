"""Trainings that are killed again and again, at any moment, and go on from their newest complete checkpoint."""

import contextlib
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from ranks import fork_context

import unwall

STEPS = 12
KILLS = {1: 6, 2: 4}
"""Of each training, by its number of ranks: forty in all, over four placements and two numbers of ranks."""


def train(rank, world, folder, where, store, log):
    """One rank of a training, until it is done or killed."""
    for path, descriptor in ((log, 1), (folder / "errors", 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    tiers = {"mixed": {"params": "host", "optimizer": "disk"}}.get(where, {"params": where, "optimizer": where})
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(6)])
    unwall.shard(model, unwall.Plan(**tiers, disk=folder / "tier"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    saved, step = folder / "saved", 0
    if saved.is_dir():
        with contextlib.suppress(FileNotFoundError):
            step = unwall.load(saved, model, optimizer)["step"]
    print("begins", step, flush=True)
    while step < STEPS:
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 96)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print("loss", step, loss.item().hex(), flush=True)
        unwall.save(saved, model, optimizer, extra={"step": step}, keep=2, block=step % 2 == 0)
    unwall.save(saved, model, optimizer, extra={"step": step}, keep=2)
    print("done", flush=True)
    os._exit(0)


class Training:
    """All ranks of one training, from wherever its newest checkpoint left it."""

    def __init__(self, folder, where, world, number):
        (folder / "tier").mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"log-{number}-{rank}" for rank in range(world)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            log.touch()
            arguments = (rank, world, folder, where, folder / f"store-{number}", log)
            self.processes.append(fork_context().Process(target=train, args=arguments))
            self.processes[-1].start()

    def lines(self):
        return [line.split() for line in self.logs[0].read_text().splitlines()]

    def kill_after(self, lines, seconds):
        """Kills all ranks ``seconds`` after rank 0 has printed so many lines, or when it is done."""
        until = time.monotonic() + 300
        while len(self.lines()) < lines and self.processes[0].is_alive() and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(seconds)
        for process in self.processes:
            process.kill()  # SIGKILL
        self.end()

    def end(self):
        for process in self.processes:
            process.join(timeout=600)
            assert process.exitcode is not None, "it hangs"
            process.close()


def losses(training, found):
    """Adds what a training printed; a step that was taken twice must have had the same loss both times."""
    for line in training.lines():
        if len(line) == 3 and line[0] == "loss":
            assert found.setdefault(int(line[1]), line[2]) == line[2], f"step {line[1]} has another loss than before"
    return found


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("where", ["device", "host", "disk", "mixed"])
def test_killed_trainings_go_on_with_the_losses_of_an_undisturbed_one(tmp_path, where, world):
    rng = random.Random(f"{where} {world}")
    calm = Training(tmp_path / "calm", where, world, 0)
    calm.end()
    expected = losses(calm, {})
    assert sorted(expected) == list(range(1, STEPS + 1)), (tmp_path / "calm" / "errors").read_text()[-3000:]
    folder, found, begun = tmp_path / "killed", {}, []
    for number in range(KILLS[world]):
        training = Training(folder, where, world, number)
        training.kill_after(rng.randrange(0, 5), rng.random() * 0.08)
        losses(training, found)
        begun += [int(line[1]) for line in training.lines() if line[0] == "begins" and len(line) == 2]
    last = Training(folder, where, world, KILLS[world])
    last.end()
    assert losses(last, found) == expected, (folder / "errors").read_text()[-3000:]
    assert begun == sorted(begun), "a restart went back behind an older one"
    left = sorted(path.name for path in (folder / "saved").glob("checkpoint-*"))
    assert len(left) == 2
    assert all((folder / "saved" / name / "manifest.json").exists() for name in left)
