"""Ratios of the native core to what it competes with, measured in one run on one machine.

Every row interleaves its two sides and takes the median of the ratios of neighbouring rounds, because other users of the
machine disturb both alike. Both sides get the same number of threads and, except where memory itself is measured, the same
kind of memory. On a machine with other work, compare the best of each side as well: a ratio far from theirs is noise.

    python bench/native.py [--only adamw|memory|disk] [--threads N] [--directory DIR] [--json FILE]
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from unwall.native.disk import DiskEngine, DiskFile, has_uring
from unwall.native.journal import AdamWArrays, journal_bytes, resolve, update_journaled
from unwall.native.lean import LeanArrays, lean_adamw
from unwall.native.memory import HostMemory
from unwall.native.pool import AdamWOut, AdamWStep, DType, WorkerPool, isa

GIB = 1 << 30
MIB = 1 << 20
ADAMW_NUMEL = 64 * MIB
ADAMW_BYTES = 26  # per element: half, remainder and two moments read and written, a bf16 gradient read
DISK_BYTES = 4 * GIB
BLOCK_BYTES = 4 * MIB
DEPTH = 8
REQUEST_BYTES = DEPTH * BLOCK_BYTES
BUFFER_BYTES = REQUEST_BYTES  # as much memory as fio uses; with 1 GiB our reads were slower (0.66 of fio)
console = Console()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: the best of each side, and the median ratio."""

    name: str
    ours: float
    other: float
    unit: str
    ratio: float
    goal: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.goal


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(name: str, goal: float, unit: str, ours: Sequence[float], other: Sequence[float]) -> Row:
    """Rates of neighbouring rounds, higher is better."""
    ratio = statistics.median(left / right for left, right in zip(ours, other, strict=True))
    return Row(name=name, ours=max(ours), other=max(other), unit=unit, ratio=ratio, goal=goal)


# ---- AdamW -----------------------------------------------------------------------------------------------------------


def tensor(n: int, dtype: torch.dtype, pool: WorkerPool) -> torch.Tensor:
    """On huge pages for both sides: the row is about the kernels."""
    return torch.frombuffer(HostMemory(n * dtype.itemsize, pool).buffer(), dtype=dtype)


def torch_step(n: int, grad: torch.Tensor, pool: WorkerPool) -> Callable[[], None]:
    """``torch.optim.AdamW(fused=True)`` in float32 and the casts that bf16 training needs around it."""
    param = torch.nn.Parameter(tensor(n, torch.float32, pool))
    param.grad = tensor(n, torch.float32, pool)
    half = tensor(n, torch.bfloat16, pool)
    optimizer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.01, fused=True)
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[param][name] = tensor(n, torch.float32, pool)

    def run() -> None:
        assert param.grad is not None
        param.grad.copy_(grad)
        optimizer.step()
        half.copy_(param.detach())

    return run


def interleaved(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side, round by round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            took = seconds(run)
            if turn > 0:  # the first round brings pages and threads in
                times[name].append(took)
    return times


def bench_adamw(threads: int, rounds: int = 15) -> list[Row]:
    torch.set_num_threads(threads)
    n = ADAMW_NUMEL
    with WorkerPool(threads) as pool:
        grad = tensor(n, torch.bfloat16, pool).normal_()
        half, rest = tensor(n, torch.bfloat16, pool), tensor(n, torch.int16, pool)
        exp_avg, exp_avg_sq = tensor(n, torch.float32, pool), tensor(n, torch.float32, pool)
        source, target = tensor(n, torch.float32, pool), tensor(n, torch.float32, pool)
        state = [part.data_ptr() for part in (half, exp_avg, exp_avg_sq, grad)]
        fresh = [tensor(n, part.dtype, pool) for part in (half, exp_avg, exp_avg_sq, rest)]
        elsewhere = AdamWOut(*[part.data_ptr() for part in fresh])
        step = AdamWStep(lr=1e-3, weight_decay=0.01, step=10)

        def update(out: AdamWOut | None = None) -> None:
            pool.adamw(*state, n, step, grad_dtype=DType.BF16, remainder=rest.data_ptr(), out=out).wait()

        sides = {
            "ours": update,
            "torch": torch_step(n, grad, pool),
            "copy": lambda: pool.copy(target.data_ptr(), source.data_ptr(), 4 * n).wait(),
            "torch copy": lambda: target.copy_(source),
        }
        times = interleaved(sides, rounds)
        # Without torch in the round: its threads still spin while the side after it runs.
        forms = interleaved({"in": update, "out": lambda: update(elsewhere)}, rounds)
    ours = [n / took / 1e9 for took in times["ours"]]
    other = [n / took / 1e9 for took in times["torch"]]
    rates = {name: [8 * n / took / 1e9 for took in times[name]] for name in ("copy", "torch copy")}
    best_copy = max(rates, key=lambda name: statistics.median(rates[name]))
    out_rates, in_rates = ([n / took / 1e9 for took in forms[name]] for name in ("out", "in"))
    traffic = [ADAMW_BYTES * n / took / 1e9 for took in times["ours"]]
    return [
        compare("AdamW split, bf16 grad / torch fused + casts", 1.3, "Gelem/s", ours, other),
        compare(f"AdamW split traffic / {best_copy}", 0.8, "GB/s", traffic, rates[best_copy]),
        compare("AdamW split out of place / in place", 0.9, "Gelem/s", out_rates, in_rates),
    ]


def bench_journal(threads: int, rounds: int = 15) -> list[Row]:
    """The update with a way back, and what a step that clips makes of it, against the plain update."""
    n = ADAMW_NUMEL // 4
    with WorkerPool(threads) as pool:
        half, grad = (tensor(n, torch.bfloat16, pool).normal_() for _ in range(2))
        rest, exp_avg = tensor(n, torch.int16, pool), tensor(n, torch.float32, pool).normal_().mul_(0.3)
        exp_avg_sq = tensor(n, torch.float32, pool).normal_().square_().add_(0.3)
        places = [part.data_ptr() for part in (half, exp_avg, exp_avg_sq, grad, rest)]
        arrays = AdamWArrays(
            **dict(zip(("param", "exp_avg", "exp_avg_sq", "grad", "remainder"), places, strict=True)),
            n=n,
            grad_dtype=DType.BF16,
        )
        journal = HostMemory(journal_bytes(n), pool)
        step = AdamWStep(lr=1e-3, weight_decay=0.01, step=10)
        sides: dict[str, Callable[[], object]] = {
            "plain": lambda: pool.adamw(*places[:4], n, step, grad_dtype=DType.BF16, remainder=places[4]).wait(),
            "journaled": lambda: update_journaled(pool, arrays, step, journal.address).wait(),
            "done again": lambda: resolve(pool, arrays, step, step.scaled(0.5), journal.address).wait(),
        }
        times = interleaved(sides, rounds)
    rates = {name: [n / took / 1e9 for took in times[name]] for name in sides}
    return [
        compare("AdamW split with a journal / plain", 0.7, "Gelem/s", rates["journaled"], rates["plain"]),
        compare("AdamW split taken back and done again / plain", 0.7, "Gelem/s", rates["done again"], rates["plain"]),
    ]


def bench_lean(threads: int, rounds: int = 15) -> list[Row]:
    """The update of lean states, which is arithmetic, against that of exact ones, which is memory: few cores, slower; many that
    share the memory, faster."""
    n = ADAMW_NUMEL // 4
    with WorkerPool(threads) as pool:
        half, grad = (tensor(n, torch.bfloat16, pool).normal_().mul_(0.02) for _ in range(2))
        rest, exp_avg, exp_avg_sq = (tensor(n, dtype, pool) for dtype in (torch.int16, torch.float32, torch.float32))
        parts = [tensor(n, dtype, pool) for dtype in (torch.bfloat16, torch.int8, torch.int16)]
        parts[0].copy_(half)
        lean = LeanArrays(*[part.data_ptr() for part in parts])
        exact = [part.data_ptr() for part in (half, exp_avg, exp_avg_sq, grad)]
        step = AdamWStep(lr=1e-3, weight_decay=0.01, step=10)
        sides: dict[str, Callable[[], object]] = {
            "exact": lambda: pool.adamw(*exact, n, step, grad_dtype=DType.BF16, remainder=rest.data_ptr()).wait(),
            "lean": lambda: lean_adamw(pool, lean, grad.data_ptr(), n, step, grad_dtype=DType.BF16).wait(),
        }
        times = interleaved(sides, rounds)
    rates = {name: [n / took / 1e9 for took in times[name]] for name in sides}
    return [compare("AdamW lean / exact split", 0.6, "Gelem/s", rates["lean"], rates["exact"])]


# ---- memory ----------------------------------------------------------------------------------------------------------


def touch_rate(allocate: Callable[[], object], nbytes: int) -> float:
    """GiB/s of the second of two allocations in a row. Both get fresh pages of this system, but on a virtual machine that
    hands free memory back to its host, the first one also waits for the host, many times as long."""
    allocate()
    return nbytes / seconds(allocate) / GIB


def bench_memory(threads: int, rounds: int = 5) -> list[Row]:
    nbytes = (8 if psutil.virtual_memory().available > 12 * GIB else 4) * GIB
    ours, other = [], []
    torch.set_num_threads(1)
    with WorkerPool(threads) as pool:
        for _ in range(rounds):
            ours.append(touch_rate(lambda: HostMemory(nbytes, pool), nbytes))
            other.append(touch_rate(lambda: torch.empty(nbytes, dtype=torch.uint8).fill_(0), nbytes))
    return [compare(f"map + touch {nbytes // GIB} GiB / torch.empty.fill_(0), 1 thread", 1.5, "GiB/s", ours, other)]


# ---- disk ------------------------------------------------------------------------------------------------------------


def fio_rate(path: Path, op: str) -> float:
    """GiB/s of one pass of fio over the file."""
    command = [
        "fio", "--name=unwall", f"--filename={path}", f"--rw={op}", f"--bs={BLOCK_BYTES}", f"--iodepth={DEPTH}",
        f"--size={DISK_BYTES}", "--direct=1", "--ioengine=io_uring" if has_uring() else "--ioengine=libaio",
        "--overwrite=1", "--output-format=json",
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output[output.index("{") :])["jobs"][0][op]["bw_bytes"]) / GIB


def our_rate(file: DiskFile, address: int, op: str) -> float:
    def run() -> None:
        submit = file.read if op == "read" else file.write
        for ticket in [submit(at, address + at % BUFFER_BYTES, REQUEST_BYTES) for at in range(0, DISK_BYTES, REQUEST_BYTES)]:
            ticket.wait()

    return DISK_BYTES / seconds(run) / GIB


def bench_disk(directory: Path, rounds: int = 7) -> list[Row]:
    if shutil.which("fio") is None:
        console.print("disk: skipped, fio is not installed")
        return []
    backends = ["uring", "threads"] if has_uring() else ["threads"]
    if "uring" not in backends:
        console.print("disk: no io_uring here, thread backend only")
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = Path(folder) / "blocks"
        # Ordinary pages, as fio's buffers have: HostMemory's huge pages alone would win the row (measured: 1.4 times).
        memory = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(first)
        ctypes.memset(address, 1, BUFFER_BYTES)
        options = {"threads": DEPTH, "depth": DEPTH, "queue_blocks": 4 * DISK_BYTES // BLOCK_BYTES, "block_bytes": BLOCK_BYTES}
        engines = {name: DiskEngine(name, **options) for name in backends}
        files = {name: engine.open([path], DISK_BYTES, BLOCK_BYTES, True) for name, engine in engines.items()}
        our_rate(files[backends[0]], address, "write")  # blocks that were never written cost more
        order = ["fio", *backends]
        for _ in range(rounds):
            order.append(order.pop(0))  # nobody always comes first
            for op in ("read", "write"):
                for name in order:
                    rate = fio_rate(path, op) if name == "fio" else our_rate(files[name], address, op)
                    rates.setdefault((name, op), []).append(rate)
        for engine in engines.values():
            engine.close()
    return [
        compare(f"disk {op}, {name} / fio", 0.95, "GiB/s", rates[name, op], rates["fio", op])
        for op in ("read", "write")
        for name in backends
    ]


# ---- report ----------------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row], threads: int) -> None:
    table = Table(title=f"unwall native, {threads} threads, {isa()}")
    for heading in ("measurement", "ours", "other", "unit", "ratio", "goal", ""):
        table.add_column(heading, justify="left" if heading in ("measurement", "unit", "") else "right")
    for row in rows:
        mark = "[green]met" if row.met else "[red]missed"
        table.add_row(row.name, f"{row.ours:.2f}", f"{row.other:.2f}", row.unit, f"{row.ratio:.2f}", f"{row.goal:.2f}", mark)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["adamw", "memory", "disk"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--directory", type=Path, default=Path("."), help="where the disk is measured (default: here)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    if options.only in (None, "adamw"):
        rows += bench_adamw(options.threads)
        rows += bench_journal(options.threads)
        rows += bench_lean(options.threads)
    if options.only in (None, "memory"):
        rows += bench_memory(options.threads)
    if options.only in (None, "disk"):
        rows += bench_disk(options.directory)
    show(rows, options.threads)
    if options.json is not None:
        report = {"threads": options.threads, "isa": isa(), "rows": [asdict(row) | {"met": row.met} for row in rows]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
