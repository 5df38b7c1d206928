"""What a module call costs in Python: ``python -m bench.overhead [--layers 80] [--steps 30] [--profile ROW]``.

An adapter model of many modules (each layer: seven frozen linear layers with two small trainable ones beside each, and a norm)
with kernels so tiny that next to nothing but the calls is measured. Rows: plain PyTorch, everything resident on the device,
groups that come and go. Steps of the rows are interleaved and the median counts, as wall time and as CPU time of this process,
which a busy machine disturbs less. Reported: the step, its ratio to plain PyTorch, and what each module call costs beyond it;
and the calls of Python functions in a step, per module, which no machine disturbs at all.
"""

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

import unwall

ADAPTED = 7
"""Linear layers with an adapter in each layer, as in a decoder: query, key, value, output, gate, up, down."""


class Adapted(nn.Module):
    """A frozen linear layer and a trainable one of low rank beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False)
        self.base.weight.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


class Layer(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        for param in self.norm.parameters():
            param.requires_grad_(False)
        self.parts = nn.ModuleList(Adapted(width, rank) for _ in range(ADAPTED))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        for part in self.parts:
            y = part(y)
        return x + y


def build(options: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(options.width, options.rank) for _ in range(options.layers)))


def calls_of(model: nn.Module) -> int:
    """Modules that a forward calls: lists only hold others."""
    return sum(not isinstance(module, nn.ModuleList) for module in model.modules())


@dataclass
class Row:
    name: str
    step: Callable[[], None]
    model: nn.Module
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def python_calls(self) -> int:
        """Of Python functions, in one step, with no update of the step before under way."""
        count = 0

        def called(_: FrameType, event: str, __: Any) -> None:
            nonlocal count
            count += event == "call"

        if self.name != "plain":
            unwall.api.engine(self.model).finish()
        gc.collect()
        gc.disable()
        sys.setprofile(called)
        try:
            self.step()
        finally:
            sys.setprofile(None)
            gc.enable()
        return count


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows(options: argparse.Namespace) -> list[Row]:
    batch = torch.randn(2, options.width)
    plain = build(options)
    every = [Row("plain", trained(plain, torch.optim.AdamW(trainable(plain), foreach=True), batch), plain)]
    whole = build(options)
    nbytes = 4 * sum(param.numel() for param in whole.parameters())
    kinds = {
        "resident": unwall.Plan(compute_dtype=torch.float32),
        "come and go": unwall.Plan(
            compute_dtype=torch.float32, params="host", optimizer="host", device_bytes=int(nbytes * options.share)
        ),
    }
    for name, plan in kinds.items():
        model = build(options)
        unwall.shard(model, plan)
        every.append(Row(name, trained(model, unwall.AdamW(trainable(model)), batch), model))
    return [row for row in every if options.only is None or row.name in options.only]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def report(every: list[Row]) -> None:
    plain = every[0]
    calls = calls_of(plain.model)
    print(f"{calls} module calls per forward")
    print(f"{'row':14}{'wall ms':>10}{'ratio':>8}{'us/call':>9}{'CPU ms':>10}{'ratio':>8}{'us/call':>9}{'calls':>8}")
    for row in every:
        text = f"{row.name:14}"
        for mine, theirs in ((row.wall, plain.wall), (row.cpu, plain.cpu)):
            now, base = statistics.median(mine), statistics.median(theirs)
            text += f"{now * 1e3:10.1f}{now / base:8.2f}{(now - base) / calls * 1e6:9.1f}"
        print(text + f"{row.python_calls() / calls:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"layers": 80, "width": 16, "rank": 2, "steps": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.5, help="device budget of the row that comes and goes, of its bytes")
    parser.add_argument("--only", nargs="*", help="only these rows")
    parser.add_argument("--profile", help="instead of all that: where the time of this row goes")
    parser.add_argument("--sort", default="tottime")
    parser.add_argument("--lines", type=int, default=45)
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = rows(options)
    for row in every:
        for _ in range(4):  # learns the order, and follows it
            row.step()
    if options.profile:
        chosen = next(row for row in every if row.name == options.profile)
        with cProfile.Profile() as profile:
            for _ in range(options.steps):
                chosen.step()
        pstats.Stats(profile).sort_stats(options.sort).print_stats(options.lines)
        return
    for _ in range(options.steps):
        for row in every:
            row.measure()
    report(every)


if __name__ == "__main__":
    main()
