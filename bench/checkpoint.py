"""Checkpoints against the drive and against torch's: ``python -m bench.checkpoint --shape 125m --tier host --directory DIR``.

One run, interleaved rounds, medians. A drive's own speed is that of direct reads and writes of the same number of bytes, 16 MiB
at a time with four threads. Files are put out of the page cache before each read. ``dcp`` is torch's distributed checkpoint of
the same states: fp32 parameters and moments, in host memory. Also measured: how long ``save(block=False)`` keeps the caller,
and what the steps that follow it take longer.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import unwall
from bench.shapes import SHAPES
from bench.workload import Decoder
from unwall.native.memory import HostMemory

BLOCK_BYTES = 16 << 20
THREADS = 4
STEPS_BESIDE = 3


def timed(work):
    """Seconds, and what it gave."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def raw(path, nbytes, write):
    """Seconds of a direct, sequential write (with its sync) or read of a file."""
    flags = (os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if write else os.O_RDONLY
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:
        descriptor = os.open(path, flags, 0o644)
    buffers = [memoryview(HostMemory(BLOCK_BYTES).buffer()).cast("B") for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:] = os.urandom(4096) * (BLOCK_BYTES // 4096)

    def part(number):
        for offset in range(number * BLOCK_BYTES, nbytes // BLOCK_BYTES * BLOCK_BYTES, THREADS * BLOCK_BYTES):
            os.pwrite(descriptor, buffers[number], offset) if write else os.preadv(descriptor, [buffers[number]], offset)

    def work():
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(part, range(THREADS)))
        if write:
            os.fsync(descriptor)

    seconds, _ = timed(work)
    os.close(descriptor)
    return seconds


def forget(folder):
    """Puts the files of a folder out of the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Training:
    """The reference workload with its states on one tier."""

    def __init__(self, shape, tier, folder, tokens):
        plan = unwall.Plan(params=tier, optimizer=tier, disk=folder, compute_dtype=torch.bfloat16)
        with unwall.init(plan):
            self.model = Decoder(SHAPES[shape])
        unwall.shard(self.model, plan)
        self.optimizer = unwall.AdamW(self.model.parameters(), lr=1e-4)
        self.device = unwall.api.engine(self.model).device.device
        self.tokens = torch.randint(0, SHAPES[shape].vocab, (1, tokens), device=self.device)

    def step(self):
        self.model(self.tokens, self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count):
        for _ in range(count):
            self.step()
        for group in unwall.api.engine(self.model).groups:
            group.pending.settle()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def ours(training, folder):
    """Seconds of each part of our own."""
    found = {}
    model, optimizer = training.model, training.optimizer
    found["save"], path = timed(lambda: unwall.save(folder, model, optimizer, keep=1))
    forget(folder)
    found["load"], _ = timed(lambda: unwall.load(path, model, optimizer))
    training.steps(1)
    calm, _ = timed(lambda: training.steps(STEPS_BESIDE))
    found["async: caller kept"], pending = timed(lambda: unwall.save(folder, model, optimizer, keep=1, block=False))
    beside, _ = timed(lambda: training.steps(STEPS_BESIDE))
    found["async: steps longer by"] = beside - calm
    rest, _ = timed(pending.wait)
    found["async: all of it"] = found["async: caller kept"] + beside + rest
    return found


def theirs(states, folder):
    """Seconds of torch's distributed checkpoint."""
    found = {}
    shutil.rmtree(folder, ignore_errors=True)

    def save():
        dcp.save(states, checkpoint_id=folder)
        forget(folder)  # on the disk, as ours is

    found["dcp save"], _ = timed(save)
    found["dcp load"], _ = timed(lambda: dcp.load(states, checkpoint_id=folder))
    shutil.rmtree(folder)
    found["dcp async_save: caller kept"], future = timed(lambda: dcp.async_save(states, checkpoint_id=folder))
    future.result()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="125m", choices=list(SHAPES))
    parser.add_argument("--tier", default="host", choices=["device", "host", "disk"])
    parser.add_argument("--directory", default=None)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-dcp", action="store_true")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="unwall-bench-", dir=options.directory))
    try:
        report = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report["text"])
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


def measure(options, folder):
    training = Training(options.shape, options.tier, folder, options.tokens)
    training.steps(3)
    nbytes = 12 * sum(param.numel() for param in training.model.parameters())
    states = None
    if not options.no_dcp:
        shapes = {name: param.shape for name, param in training.model.named_parameters()}
        states = {f"{name}.{kind}": torch.ones(shape) for name, shape in shapes.items() for kind in ("p", "m", "v")}
    rows = {}
    for _ in range(options.rounds):
        part = {"drive write": raw(folder / "raw", nbytes, True), "drive read": raw(folder / "raw", nbytes, False)}
        (folder / "raw").unlink()
        part |= ours(training, folder / "ours")
        if states is not None:
            part |= theirs(states, folder / "theirs")
        for name, seconds in part.items():
            rows.setdefault(name, []).append(seconds)
    median = {name: statistics.median(values) for name, values in rows.items()}
    lines = [f"{options.shape}, states on {options.tier}, {nbytes / 1e9:.1f} GB, {torch.__version__}, {os.cpu_count()} cores"]
    for name, seconds in median.items():
        lines.append(f"{name:28} {seconds:8.3f} s  {nbytes / seconds / 1e9:7.2f} GB/s")
    write, read = median["drive write"], median["drive read"]
    ratios = {
        "save / drive (goal 0.85)": write / median["save"],
        "load / drive (goal 0.85)": read / median["load"],
        "caller kept / blocking save (goal 0.05)": median["async: caller kept"] / median["save"],
    }
    if states is not None:
        ratios["save against dcp (goal above 1)"] = median["dcp save"] / median["save"]
        ratios["load against dcp (goal above 1)"] = median["dcp load"] / median["load"]
        kept = median["async: caller kept"]
        ratios["caller kept against dcp.async_save (goal above 1)"] = median["dcp async_save: caller kept"] / kept
    lines += [f"{name:52} {value:6.2f}" for name, value in ratios.items()]
    if importlib.util.find_spec("deepspeed") is None:
        lines.append("DeepSpeed is not installed: not compared")
    return {"text": "\n".join(lines), "seconds": rows, "ratios": ratios, "nbytes": nbytes}


if __name__ == "__main__":
    main()
