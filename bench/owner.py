"""Parameters from the host to all ranks, in two ways: every rank moves its 1/N over its own link and all gather (what the
engine does), or the rank that owns a group moves all of it and broadcasts. ``python -m bench.ablation --parts ranks``.

[Note: owners]
The owner of a group is its number modulo the ranks. Measured are passes, forward and backward, without a step: so the owner's
whole copy on the host, which is made once before, stays true, and nothing but the fetches differs. Gradients are summed as the
engine does it, in both. The values are the same bits.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unwall
from bench.shapes import SHAPES
from bench.switches import replaced
from bench.workload import batch_of, build
from unwall.runtime.engine import Engine
from unwall.shards.collectives import Collective
from unwall.shards.group import Group
from unwall.tiers.block import Region
from unwall.tiers.host import HostBlock

PARTS, OWNER = "every rank moves its 1/N", "broadcast from an owner"
PLAN: dict[str, Any] = {"params": "host", "optimizer": "host", "activations": "keep"}


def whole_copies(engine: Engine) -> dict[int, HostBlock]:
    """By group: all of its parameters, on the host of the rank that owns it."""
    found = {}
    for group in engine.groups:
        assert group.param is not None
        whole = torch.empty(group.layout.padded_numel, dtype=group.layout.dtype)
        engine.ranks.all_gather(whole, group.param.tensor(write=False)).wait()
        if engine.ranks.rank == group.index % engine.ranks.size:
            block = engine.tiers.host.allocate(whole.nbytes, f"all of {group.name}", pinned=True)
            block.view(whole.dtype)[: whole.numel()].copy_(whole)
            found[group.index] = block
    return found


@contextmanager
def owners(engine: Engine) -> Iterator[None]:
    """Inside, groups are fetched by their owners. See [Note: owners]."""
    copies, ranks, links = whole_copies(engine), engine.ranks, engine.tiers.links

    def gather(group: Group, into: torch.Tensor | None) -> Collective:
        target, from_rank = torch.empty_like(group.flat) if into is None else into, group.index % ranks.size
        if into is None and ranks.rank == from_rank:
            target = group.flat
        ranks.traffic.gathered_bytes += target.nbytes if ranks.rank != from_rank else 0
        work = dist.broadcast(target, group=ranks._group, group_src=from_rank, async_op=True)
        return ranks._begun(work, (target,), "broadcast")

    def start_filling(group: Group) -> None:
        with torch.no_grad():
            if group.index in copies:
                block = Region.whole(copies[group.index])
                group._copying = links.copy(block, Region(group.buffer.block, 0, block.nbytes), group.name)
                group.buffer.hold(group._copying)
                group._await_copy()
            group._gathering = group._gather(group.flat)
            group.buffer.hold(group._gathering)

    try:
        with replaced(Group, "_gather", gather), replaced(Group, "_start_filling", start_filling):
            yield
    finally:
        for block in copies.values():
            engine.tiers.host.free(block)


def passes(model: torch.nn.Module, optimizer: unwall.AdamW, data: tuple[torch.Tensor, ...], count: int) -> list[float]:
    """Seconds of each forward and backward, and the last loss behind them."""
    found, loss, executor = [], torch.zeros(()), unwall.api.engine(model).executor
    for _ in range(count):
        for index in range(len(executor.groups)):
            executor.invalidate(index)  # as an update would
        dist.barrier()
        start = time.perf_counter()
        loss = model(*data)
        loss.backward()
        dist.barrier()
        found.append(time.perf_counter() - start)
        optimizer.zero_grad()
    return [*found, float(loss.detach())]


def measure(shape_name: str, steps: int, rounds: int, rate: float | None = None) -> list[dict[str, Any]]:
    """One rank. What it moved, and how long that took."""
    shape, rank = SHAPES[shape_name], dist.get_rank()
    model = build(shape, "cpu")
    unwall.shard(model, unwall.Plan(**PLAN))
    optimizer = unwall.AdamW(model.parameters(), speculate=False)
    engine = unwall.api.engine(model)
    data = batch_of(shape, 1, 8, torch.device("cpu"), rank)
    passes(model, optimizer, data, 2)
    if rate is not None:
        engine.tiers.links.pool("host", "device").throttle(2 * rate)  # each byte is read and written
    found = {row: {"row": row, "times_s": [], "losses": []} for row in (PARTS, OWNER)}
    for _ in range(rounds):
        for row, note in found.items():
            if row == OWNER:
                with owners(engine):
                    _turn(model, optimizer, data, steps, note)
            else:
                _turn(model, optimizer, data, steps, note)
    return list(found.values())


def _turn(model: torch.nn.Module, optimizer: unwall.AdamW, data: Any, steps: int, note: dict[str, Any]) -> None:
    passes(model, optimizer, data, 1)
    unwall.stats(model).reset()
    *times, loss = passes(model, optimizer, data, steps)
    stats = unwall.stats(model)
    note["times_s"] += times
    note["losses"].append(loss)
    note["link_bytes"] = stats.links["host>device"].moved_bytes // steps if "host>device" in stats.links else 0
    note["received_bytes"] = stats.collectives["all_gather"].bytes // steps
    largest = max(group.layout.flat_bytes for group in unwall.api.engine(model).groups)
    note["group_bytes"] = largest // (1 if note["row"] == OWNER else dist.get_world_size())


def _rank(rank: int, world: int, folder: str, options: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    results.put((rank, measure(**options)))
    dist.barrier()
    dist.destroy_process_group()


def run(
    worlds: tuple[int, ...], shape: str, steps: int = 3, rounds: int = 2, rate: float | None = None
) -> list[dict[str, Any]]:
    """The rows of all numbers of ranks: times are rank 0's, bytes over the link those of the rank with most."""
    found = []
    given = {"shape_name": shape, "steps": steps, "rounds": rounds, "rate": rate}
    for world in worlds:
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_rank, args=(world, folder, given, results), nprocs=world, start_method="spawn")
            ranks = dict(results.get() for _ in range(world))
        for index, row in enumerate(ranks[0]):
            every = [rows[index] for rows in ranks.values()]
            most = {key: max(each[key] for each in every) for key in ("link_bytes", "received_bytes", "group_bytes")}
            found.append(row | most | {"world": world, "step_s": statistics.median(row["times_s"])})
    return found
