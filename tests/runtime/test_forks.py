"""Processes forked beside a sharded model: workers that only hold it are fine, using it there is an error."""

import atexit
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import unwall
from unwall.plans import Plan

WIDTH = 16
USES = {
    "forward": lambda model, optimizer: model(torch.zeros(1, WIDTH)),
    "step": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: model.zero_grad(),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "optimizer's state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(ZEROS),
    "full_params": lambda model, optimizer: unwall.full_params(model).__enter__(),
    "stats": lambda model, optimizer: unwall.stats(model),
}
ZEROS = {
    f"{i}.{name}": torch.zeros(*shape) for i in range(3) for name, shape in [("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,))]
}


def start(place, folder):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    unwall.shard(model, Plan(params=place, optimizer=place, compute_dtype=torch.float32, disk=folder))
    return model, unwall.AdamW(model.parameters(), lr=1e-2)


def iterate(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def in_child(work):
    """The exit status of a forked child that runs ``work``. A child that hangs is ended by an alarm."""
    child = os.fork()
    if child == 0:
        signal.alarm(100)
        try:
            status = work()
        except BaseException:
            status = 99
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_child_that_uses_the_model_is_told(place, tmp_path):
    model, optimizer = start(place, tmp_path)
    losses = [iterate(model, optimizer, torch.ones(2, WIDTH))]

    def use_all():
        for use in USES.values():
            try:
                use(model, optimizer)
                return 1
            except RuntimeError as error:
                if "forked child" not in str(error):
                    return 2
        return 0

    assert in_child(use_all) == 0
    losses += [iterate(model, optimizer, torch.ones(2, WIDTH)) for _ in range(2)]
    calm, calm_optimizer = start(place, tmp_path)
    assert losses == [iterate(calm, calm_optimizer, torch.ones(2, WIDTH)) for _ in range(3)]


class Rows(Dataset):
    """Its workers are forked, and have all that the parent has."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((WIDTH,), float(index) / 12)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_forked_workers_of_a_loader(place, tmp_path):
    model, optimizer = start(place, tmp_path)
    rows = Rows(model)
    losses = [
        iterate(model, optimizer, batch)
        for _ in range(2)
        for batch in DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork")
    ]
    calm, calm_optimizer = start(place, tmp_path)
    assert losses == [iterate(calm, calm_optimizer, batch) for _ in range(2) for batch in DataLoader(rows, batch_size=4)]


@pytest.mark.parametrize("drops", ["drops", "keeps"])
def test_a_child_that_exits_leaves_the_files(drops, tmp_path):
    """In a process of its own: exit handlers of what other tests have imported are not made for a forked child."""
    subprocess.run([sys.executable, __file__, drops, tmp_path], check=True, timeout=400)


def exits(drops, folder):
    held = list(start("disk", folder))
    iterate(*held, torch.ones(2, WIDTH))
    files = sorted(folder.iterdir())

    def leave():
        if drops:
            held.clear()
            gc.collect()
        atexit._run_exitfuncs()
        threading._shutdown()
        return 0

    assert in_child(leave) == 0
    assert sorted(folder.iterdir()) == files != []
    iterate(*held, torch.ones(2, WIDTH))


def a_child_of_a_rank_exits(folder):
    held = list(start("disk", folder))
    iterate(*held, torch.ones(2, WIDTH))

    def leave():
        atexit._run_exitfuncs()
        threading._shutdown()
        return 0

    status = in_child(leave)
    return status, iterate(*held, torch.ones(2, WIDTH))


def test_a_child_of_a_rank_that_exits_leaves_its_process_groups(ranks, tmp_path):
    """It has none of their threads: to give them up there was a segmentation fault."""
    (one, loss), (other, same) = ranks(2).run(a_child_of_a_rank_exits, str(tmp_path))
    assert (one, other) == (0, 0)
    assert loss == same


if __name__ == "__main__":
    exits(sys.argv[1] == "drops", Path(sys.argv[2]))
