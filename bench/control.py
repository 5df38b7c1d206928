"""What an exchange of words between ranks costs a training step: ``python -m bench.control``.

Two gloo ranks train a stack of linear layers, with 5 ms added to every exchange and without, by script and with each collective
negotiated. Rounds are interleaved and the best step of each case counts, so that a machine that is busy now and then does not.
"""

import argparse
import os
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import unwall
from unwall.schedule.script import Book
from unwall.shards.control import Control

RANKS = 2
DELAY_S = 0.005


@dataclass(frozen=True)
class Case:
    """How the ranks agree."""

    delay_s: float
    negotiate: bool

    def __str__(self) -> str:
        how = "each collective negotiated" if self.negotiate else "by script"
        return f"{how}, {self.delay_s * 1e3:.0f} ms per exchange"


CASES = [Case(delay_s, negotiate) for negotiate in (False, True) for delay_s in (0.0, DELAY_S)]


class Slow:
    """Adds a delay to every exchange, and can have the ranks follow no script."""

    def __init__(self):
        self.case = CASES[0]
        exchange, expected = Control.exchange, Book.expected

        def late(control, *args):
            time.sleep(self.case.delay_s)
            return exchange(control, *args)

        Control.exchange = late
        Book.expected = lambda book, situation: None if self.case.negotiate else expected(book, situation)


def measure(rank, folder, options, results):
    """One rank: seconds of the best step and exchanges per step, by case."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    layers = [layer for _ in range(options.layers) for layer in (nn.Linear(options.width, options.width), nn.GELU())]
    model = nn.Sequential(*layers)
    unwall.shard(model, unwall.Plan(stage=3, compute_dtype=torch.float32))
    optimizer = unwall.AdamW(model.parameters())
    batch = torch.randn(options.batch, options.width)
    slow, best, exchanges = Slow(), {}, {}

    def step():
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(options.rounds):
        for slow.case in CASES:
            for _ in range(3):  # learns, and follows
                step()
            for _ in range(options.steps):
                unwall.stats(model).reset()
                dist.barrier()
                begin = time.perf_counter()
                step()
                seconds = time.perf_counter() - begin
                exchanges[slow.case] = unwall.stats(model).control_exchanges
                best[slow.case] = min(best.get(slow.case, seconds), seconds)
    if rank == 0:
        results.put((best, exchanges))
    dist.barrier()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"layers": 12, "width": 512, "batch": 512, "rounds": 5, "steps": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(measure, args=(folder, parser.parse_args(), results), nprocs=RANKS, start_method="spawn")
        best, exchanges = results.get()
    for case in CASES:
        alone = best[Case(0.0, case.negotiate)]
        print(f"{case!s:50} {best[case] * 1e3:8.1f} ms {exchanges[case]:4d} exchanges {best[case] / alone:6.3f}")


if __name__ == "__main__":
    main()
