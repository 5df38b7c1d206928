"""Small models at batch 1, where launches and Python are the limit: ``python -m bench.small [--steps 200] [--json FILE]``.

The reference decoder with about half a million and about two million parameters, on the accelerator or, where there is none, on
the CPU with one thread of torch's. Rows: plain PyTorch (a bf16 model, fp32 masters beside it and torch's fused AdamW, as in the
suite), and ``unwall.shard(model)`` as a user writes it, with everything on the device. Neither recomputes anything. The rows
take turns, one step each, with the device idle before and after, and the median counts. Reported: the step, its ratio to plain
PyTorch, the goal, and the calls of Python functions in a step, which no machine disturbs. ``--profile [ROW]``: instead of all
that, where the Python time of a row goes.
"""

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import unwall
from bench.losses import differs_at
from bench.machine import describe
from bench.shapes import Shape
from bench.workload import ADAMW, COMPUTE_DTYPE, Decoder, batch_of

GOAL = 1.05
"""At most this many times a step of plain PyTorch."""
SMALL = {"0.5m": Shape(96, 4, 224, 4, 512), "2m": Shape(192, 4, 512, 4, 512)}
ROWS = ("plain", "unwall")


class Small(Decoder):
    """Keeps the logits too: with them so few there is nothing to gain."""

    recompute = False

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self._loss(self.norm(x), labels)


@dataclass
class Row:
    name: str
    step: Callable[[], torch.Tensor]
    """Forward, backward and update; gives the loss, detached."""
    finish: Callable[[], None] = lambda: None
    """Waits for what the last step left to run beside the next one."""
    times: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)

    def measure(self, wait: Callable[[], None]) -> None:
        wait()
        begun = time.perf_counter()
        loss = self.step()
        wait()
        self.times.append(time.perf_counter() - begun)
        self.losses.append(loss)

    def python_calls(self) -> int:
        """Of Python functions, in one step, backward included."""
        count = 0

        def called(_: FrameType, event: str, __: Any) -> None:
            nonlocal count
            count += event == "call"

        self.finish()
        with _in_one_thread():
            sys.setprofile(called)
            try:
                self.step()
            finally:
                sys.setprofile(None)
        return count

    def profile(self, steps: int) -> pstats.Stats:
        with _in_one_thread(), cProfile.Profile() as profile:
            for _ in range(steps):
                self.step()
            self.finish()
        return pstats.Stats(profile)


@contextmanager
def _in_one_thread() -> Iterator[None]:
    """Backward runs in the thread that asks for it, which is the one that is watched, and nothing is collected meanwhile."""
    gc.collect()
    gc.disable()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        gc.enable()


def plain(model: Small, data: tuple[torch.Tensor, torch.Tensor], clip: float | None) -> Row:
    """What bench/engines/plain.py does, for one rank."""
    params: list[torch.Tensor] = list(model.parameters())
    masters = [param.detach().clone() for param in params]
    model.to(COMPUTE_DTYPE)
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    # unwall.shard looks through the parameters of each optimizer in the process before its step, unless it is marked: here
    # they would count as work of plain PyTorch.
    optimizer._unwall_inner = True  # type: ignore[attr-defined]

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*data)
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        return loss.detach()

    return Row("plain", step)


def sharded(model: Small, data: tuple[torch.Tensor, torch.Tensor], clip: float | None) -> Row:
    unwall.shard(model)
    optimizer = unwall.AdamW(model.parameters(), max_grad_norm=clip, **ADAMW)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Row("unwall", step, unwall.api.engine(model).finish)


def rows(size: str, options: argparse.Namespace) -> list[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = batch_of(SMALL[size], 1, options.seq, device, seed=0)
    found = []
    for start in (plain, sharded):
        with torch.device(device):
            model = Small(SMALL[size])
        found.append(start(model, data, options.clip))
    return found


def run(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one size."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    gc.collect()  # what an earlier size has left: its end would be noticed in the middle
    every = rows(size, options)
    for _ in range(options.warm + options.steps):
        for row in every:
            row.measure(wait)
    found: dict[str, Any] = {"size": size, "params": SMALL[size].params, "rows": {}}
    for row in every:
        times = row.times[options.warm :]
        losses = torch.stack(row.losses).tolist()
        found["rows"][row.name] = {"step_s": statistics.median(times), "times_s": times, "losses": losses}
        found["rows"][row.name]["python_calls"] = row.python_calls()
    base, ours = (found["rows"][name] for name in ROWS)
    ratio = ours["step_s"] / base["step_s"]
    differs = differs_at(ours["losses"], base["losses"])
    return found | {"ratio": ratio, "goal": GOAL, "met": ratio <= GOAL, "losses_differ_at": differs}


def report(found: dict[str, Any]) -> None:
    print(f"{found['size']}: {found['params']:,} parameters")
    for name, row in found["rows"].items():
        print(f"  {name:8}{row['step_s'] * 1e3:10.3f} ms per step{row['python_calls']:8} Python calls")
    print(f"  ratio {found['ratio']:.3f}, goal at most {found['goal']:.2f}: {'met' if found['met'] else 'not met'}")
    if found["losses_differ_at"] is not None:
        print(f"  the losses differ from step {found['losses_differ_at']} on: the rows did not train the same")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SMALL, default=list(SMALL))
    for name, default in {"seq": 64, "steps": 200, "warm": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clip", type=lambda text: None if text == "none" else float(text), default=1.0, help="or none")
    parser.add_argument("--json", type=Path, help="all figures go there too")
    parser.add_argument("--profile", nargs="?", choices=ROWS, const="unwall", help="where the Python time of this row goes")
    parser.add_argument("--sort", default="tottime")
    parser.add_argument("--lines", type=int, default=45)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if options.profile:
        for size in options.sizes:
            row = next(row for row in rows(size, options) if row.name == options.profile)
            for _ in range(options.warm):
                row.step()
            row.profile(options.steps).sort_stats(options.sort).print_stats(options.lines)
        return
    found = []
    for size in options.sizes:
        found.append(run(size, options))
        report(found[-1])
    if options.json:
        setting = {"seq": options.seq, "clip": options.clip, "torch": torch.__version__, "machine": describe(None)}
        options.json.write_text(json.dumps({"setting": setting, "sizes": found}, indent=1))


if __name__ == "__main__":
    main()
