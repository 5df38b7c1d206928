"""Overlap, by injected delay: with one part of the machine slowed down, steps take that part's time and not the sum.

A slowed part alone would take the bytes that went through it, by our own count, divided by the speed it was given.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from offload import DISK, HOST
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.tiers.workers import shared_pool

ALONE_S = 1.5
"""About how many seconds a slowed part should take per step: long against everything else (0.03 to 0.1 s)."""
LIMIT = 1.15
LOOSER = {
    "all on disk, slow reads and writes": 1.3,
    "optimizer on disk, slow writes and link": 1.3,
    "all on host, slow link and update": 1.25,
    "all on host, slow link back and update": 1.2,
}
"""Where 1.15 is not reached, or barely; the sum would be 2. Measured beside other work, at real-time priority, best of a few:
1.19, 1.14, 1.14 and 1.11. Disk: gradients are written in turn with the states of updates ahead, so that nearly all writes
fall into backward, and what forward reads comes on top. Host: the last gradients land when backward has ended, and forward
begins with their groups."""
LAYERS, WIDTH = 24, 192
"""Each layer is a group without padding."""
STEPS, WARM_UP = 2, 10
"""Steps before anything is slowed down: the engine knows the order of groups, and that clipping is not active."""
PAIR_ALONE_S, PAIR_STEPS = 0.5, 6
"""The same for two slow parts."""
UPDATE_TRAFFIC = 26
"""Bytes moved per updated parameter: a split master and two moments in and out (2 x 12), and a gradient (2)."""


@dataclass
class Part:
    """Something that can be slowed down."""

    throttle: Callable[[float], None]
    moved_bytes: Callable[[], int]
    """So far: counted when it is asked for, not when it has moved."""


def count_disk_bytes(disk):
    """Bytes read from and written to a disk tier, from now on."""
    moved = Counter()

    def counting(op, inner):
        def counted(block, offset, address, nbytes, *args, **kwargs):
            moved[op] += -(-nbytes // 4096) * 4096
            return inner(block, offset, address, nbytes, *args, **kwargs)

        return counted

    for op in ("read", "write"):
        setattr(disk, op, counting(op, getattr(disk, op)))
    return moved


def parts_of(model, disk_bytes, steps_done):
    tiers = unwall.api.engine(model).tiers
    numel = sum(param.numel() for param in model.parameters())

    def link(source, target):
        # a copy reads each byte and writes it
        return Part(
            tiers.links.pool(source, target).throttle,
            lambda: 2 * tiers.links.meters[source, target].read().moved_bytes,
        )

    def disk(op):
        return Part(lambda rate: tiers.disk.engine.throttle(op, rate), lambda: disk_bytes[op])

    return {
        "update": Part(shared_pool().throttle, lambda: UPDATE_TRAFFIC * numel * steps_done()),
        "host>device": link("host", "device"),
        "device>host": link("device", "host"),
        "disk read": disk("read"),
        "disk write": disk("write"),
    }


def measure(placement, slowed, clip, folder):
    """Seconds per step, and those that the slowest of the slowed parts alone takes for what it moved in these steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    unwall.shard(model, Plan(**placement, disk=folder))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3, max_grad_norm=clip)
    inputs = torch.randn(4, WIDTH)
    disk = unwall.api.engine(model).tiers.disk
    disk_bytes = count_disk_bytes(disk) if disk is not None else Counter()
    done = 0

    def run(steps, wait=True):
        nonlocal done
        for _ in range(steps):
            model(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        if wait:
            unwall.stats(model)

    alone_s, steps = (ALONE_S, STEPS) if len(slowed) == 1 else (PAIR_ALONE_S, PAIR_STEPS)
    run(WARM_UP)
    parts = parts_of(model, disk_bytes, lambda: done)
    before = {name: parts[name].moved_bytes() for name in slowed}
    run(steps)
    rates = {name: (parts[name].moved_bytes() - before[name]) / steps / alone_s for name in slowed}
    try:
        for name, rate in rates.items():
            parts[name].throttle(rate)
        run(1, wait=False)  # its update is under way when the clock starts, as the last one's is when it stops
        before = {name: parts[name].moved_bytes() for name in rates}
        began = time.perf_counter()
        run(steps, wait=False)
        taken = (time.perf_counter() - began) / steps
        alone = {name: (parts[name].moved_bytes() - before[name]) / rate / steps for name, rate in rates.items()}
    finally:
        for name in rates:
            parts[name].throttle(0)
    return taken, alone


HOST_AND_DISK = {"params": "host", "optimizer": "disk"}
CASES = {
    "all on disk, slow reads": (DISK, ("disk read",)),
    "all on disk, slow writes": (DISK, ("disk write",)),
    "all on disk, slow reads and writes": (DISK, ("disk read", "disk write")),
    "all on disk, slow update": (DISK, ("update",)),
    "optimizer on disk, slow writes and link": (HOST_AND_DISK, ("disk write", "host>device")),
    "all on host, slow link to the device": (HOST, ("host>device",)),
    "all on host, slow link from the device": (HOST, ("device>host",)),
    "all on host, slow update": (HOST, ("update",)),
    "all on host, slow link and update": (HOST, ("host>device", "update")),
    "all on host, slow link back and update": (HOST, ("device>host", "update")),
}


@pytest.mark.clock
@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_as_long_as_its_slowest_part(case, tmp_path, record_property):
    placement, slowed = CASES[case]
    for _ in range(4):  # retries: the machine may have other work
        taken, alone = measure(placement, slowed, None, str(tmp_path))
        record_property("seconds", f"{taken:.3f} per step, alone {alone}")
        if taken <= LOOSER.get(case, LIMIT) * max(alone.values()):
            break
    assert 0.9 * max(alone.values()) <= taken <= LOOSER.get(case, LIMIT) * max(alone.values()), (
        f"{taken:.3f} s per step, alone {alone}"
    )
