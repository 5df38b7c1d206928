"""A week in small: 20,000 steps with looks, evaluations and faults at random. Nothing grows.

In a process of its own: what other tests have left in this one comes and goes."""

import contextlib
import errno
import gc
import os
import random
import threading
from pathlib import Path

import psutil
import pytest
import torch
from ranks import alone
from torch import nn

import unwall
from unwall.native.disk import DiskEngine

WIDTH = 16
PLACES = {
    "device": ({"params": "device", "optimizer": "device"}, 8_000),
    "host": ({"params": "host", "optimizer": "host", "device_bytes": "24KiB"}, 7_000),
    "disk": ({"params": "disk", "grads": "disk", "optimizer": "disk"}, 5_000),
}


def held() -> dict[str, int]:
    """What a process could leak."""
    gc.collect()
    process = psutil.Process()
    return {
        "MiB": process.memory_info().rss >> 20,
        "handles": process.num_fds(),
        "threads": sum(not name.startswith("iou-") for name in _thread_names()),  # the kernel's, for io_uring, come and go
        "python threads": threading.active_count(),
        "objects": len(gc.get_objects()),
    }


def something_else(model, optimizer, choose: random.Random, engine: DiskEngine | None) -> None:
    """What happens now and then between two steps."""
    what = choose.choice(["look", "save", "evaluate", "forget", "raise", "fault", "write"])
    x = torch.ones(2, WIDTH)
    if what == "look":
        optimizer.state_dict()
    elif what == "save":
        state = model.state_dict()
        model.load_state_dict(state)
    elif what == "evaluate":
        with torch.no_grad():
            model.eval()(x)
        model.train()
    elif what == "forget":
        model(x).sum().backward()
        optimizer.zero_grad()
    elif what == "raise":
        handle = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
    elif what == "write":
        with unwall.full_params(model, write=True), torch.no_grad():
            model[0].weight.clamp_(-1, 1)
    elif engine is not None:
        engine.inject_fault(choose.choice(["read", "write"]), choose.randrange(4), 1, errno.EIO)


@pytest.mark.drill
@pytest.mark.parametrize("place", list(PLACES))
def test_nothing_grows(place, tmp_path):
    alone(live, place, tmp_path, limit_s=800)


def live(place: str, tmp_path: Path) -> None:
    fields, steps = PLACES[place]
    choose = random.Random(0)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    disk = {"disk": tmp_path} if place == "disk" else {}
    unwall.shard(model, unwall.Plan(**fields, **disk, compute_dtype=torch.bfloat16))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    tiers = unwall.api.engine(model).tiers
    engine = None if tiers.disk is None else tiers.disk.engine
    faults, before, files = 0, {}, []
    for step in range(steps):
        if step == steps // 4:
            before, files = held(), _files(tmp_path)
        try:
            if choose.random() < 0.02:
                something_else(model, optimizer, choose, engine)
            loss = model(torch.randn(2, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
        except OSError:  # of the disk: the batch is given up
            faults += 1
            optimizer.zero_grad()
    after = held()
    assert torch.isfinite(loss)
    assert _files(tmp_path) == files
    assert after["handles"] <= before["handles"]
    assert after["threads"] <= before["threads"]
    assert after["python threads"] <= before["python threads"]
    assert after["objects"] <= before["objects"] + 500, (before, after)
    assert after["MiB"] <= before["MiB"] + 16, (before, after)
    assert (faults > 0) == (place == "disk")


def _thread_names() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found.append((task / "comm").read_text())
    return found


def _files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))
