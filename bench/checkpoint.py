"""Checkpoints against the drive, torch's and DeepSpeed's: ``python -m bench.checkpoint --shape 1b --tier host``.

One run, interleaved rounds, medians, as rates (bytes of states per second) and ratios of rates. A drive's own speed is that of
direct reads and writes, 16 MiB at a time with four threads. Files are put out of the page cache before each read. ``load``
goes into an optimizer that was just built, as when a training is resumed; ``load over`` into one that has stepped; the memory
that they want was in use before (``fetch_memory``). ``dcp`` is the distributed checkpoint of torch, of fp32 parameters and
moments in host memory, on the disk as ours is; DeepSpeed's is that of the 125m shape with ZeRO-3 and states on the host, in a
process of its own. Also measured: how long ``save(block=False)`` keeps the caller, what the steps that follow it take longer,
and how many bytes a load reads from the drive for each that it loads. No round is begun after ``--seconds``; ``--parts``
leaves some of it out. ``--shape 3b`` needs 42 GB on the drive and 100 GB of host memory.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
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
SAMPLE_BYTES = 6 << 30
"""At most so much of the drive is measured, and so many bytes of states given to others."""
OVER_BYTES = 20e9
"""Of larger models there is no time to measure a load over states."""
DEEPSPEED_SECONDS = 100


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
        self.renew()
        self.device = unwall.api.engine(self.model).device.device
        self.tokens = torch.randint(0, SHAPES[shape].vocab, (1, tokens), device=self.device)

    def renew(self):
        """An optimizer that has not stepped."""
        self.optimizer = None
        gc.collect()
        self.optimizer = unwall.AdamW(self.model.parameters(), lr=1e-4)

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


def bytes_from_drives():
    """What this process has read from drives so far, or None where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return None


def fetch_memory(nbytes):
    """Some virtual machines get memory from their host when it is touched first, at a tenth of a drive's speed, and keep it for
    a while: that is not what is measured here."""
    memory = HostMemory(nbytes)
    ctypes.memset(memory.address, 1, nbytes)


def load(path, training, fresh_bytes):
    """Seconds, and bytes from drives. Nothing is in the page cache. ``fresh_bytes``: of host memory that it will want."""
    forget(path)
    fetch_memory(fresh_bytes)
    before = bytes_from_drives()
    seconds, _ = timed(lambda: unwall.load(path, training.model, training.optimizer))
    return seconds, None if before is None else bytes_from_drives() - before


def ours(training, folder, nbytes, parts):
    """Bytes and seconds of each part of our own."""
    found = {}
    model = training.model
    found["save"], path = timed(lambda: unwall.save(folder, model, training.optimizer))
    read = {}
    if "load" in parts:
        training.renew()
        found["load"], read["load"] = load(path, training, nbytes // 2)
    if "over" in parts and nbytes < OVER_BYTES:
        found["load over"], read["load over"] = load(path, training, nbytes + nbytes // 4)
    shutil.rmtree(folder)  # the drive may not hold two
    if "async" in parts:
        found |= beside(training, folder)
    rows = {name: (nbytes, seconds) for name, seconds in found.items()}
    return rows, {name: count / nbytes for name, count in read.items() if count is not None}


def beside(training, folder):
    """Seconds of a save that goes on while training does."""
    found, model = {}, training.model
    training.steps(2)
    calm, _ = timed(lambda: training.steps(STEPS_BESIDE))
    found["async: caller kept"], pending = timed(lambda: unwall.save(folder, model, training.optimizer, block=False))
    beside, _ = timed(lambda: training.steps(STEPS_BESIDE))
    rest, _ = timed(pending.wait)
    found["async: all of it"] = found["async: caller kept"] + beside + rest
    found[f"{STEPS_BESIDE} steps, calm"], found[f"{STEPS_BESIDE} steps, beside a save"] = calm, beside
    shutil.rmtree(folder)
    return found


def theirs(states, folder):
    """The same of torch's distributed checkpoint."""
    found = {}

    def save():
        dcp.save(states, checkpoint_id=folder)
        forget(folder)  # on the disk, as ours is

    found["dcp save"], _ = timed(save)
    found["dcp load"], _ = timed(lambda: dcp.load(states, checkpoint_id=folder))
    shutil.rmtree(folder)
    found["dcp async: caller kept"], future = timed(lambda: dcp.async_save(states, checkpoint_id=folder))
    future.result()
    shutil.rmtree(folder)
    nbytes = sum(tensor.nbytes for tensor in states.values())
    return {name: (nbytes, seconds) for name, seconds in found.items()}


def states_for(model):
    """fp32 parameters and moments of the first parameters, at most ``SAMPLE_BYTES``."""
    found, nbytes = {}, 0
    for name, param in model.named_parameters():
        nbytes += 12 * param.numel()
        if found and nbytes > SAMPLE_BYTES:
            break
        found |= {f"{name}.{kind}": torch.ones(param.shape) for kind in ("p", "m", "v")}
    return found


def deepspeed_worker(folder):
    """In a process of its own: prints bytes and seconds of DeepSpeed's ``save_checkpoint``."""
    import deepspeed
    from bench.engines import Job
    from bench.engines.deepspeed import settings

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29571"}
    deepspeed.init_distributed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randint(0, SHAPES["125m"].vocab, (1, 64), device=device)
    job = Job(
        shape=SHAPES["125m"],
        device=device,
        data=(tokens, tokens),
        batch=1,
        clip=None,
        options={"offload": "cpu"},
        scratch=Path(folder),
    )
    config = settings(job)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Decoder(SHAPES["125m"])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(tokens, tokens))
    engine.step()

    def save():
        engine.save_checkpoint(folder)
        forget(folder)

    save()
    shutil.rmtree(folder)
    seconds, _ = timed(save)
    nbytes = 12 * sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())
    print("DEEPSPEED", json.dumps([nbytes, seconds]), flush=True)


def deepspeeds(folder):
    """The row of DeepSpeed, or why there is none."""
    command = [sys.executable, "-m", "bench.checkpoint", "--deepspeed-worker", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEEPSPEED_SECONDS)
    except subprocess.TimeoutExpired:
        return {}, f"DeepSpeed: not done after {DEEPSPEED_SECONDS} s"
    for line in done.stdout.splitlines():
        if line.startswith("DEEPSPEED "):
            return {"deepspeed save": tuple(json.loads(line[10:]))}, ""
    told = (done.stderr.strip() or "no output").splitlines()[-1]
    return {}, f"DeepSpeed: not compared ({told})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="125m", choices=list(SHAPES))
    parser.add_argument("--tier", default="host", choices=["device", "host", "disk"])
    parser.add_argument("--directory", default=None)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--parts", default="load,over,async", help="what is measured beside a save, of: load, over, async")
    parser.add_argument("--no-dcp", action="store_true")
    parser.add_argument("--no-deepspeed", action="store_true")
    parser.add_argument("--json", default=None)
    parser.add_argument("--deepspeed-worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.deepspeed_worker:
        deepspeed_worker(options.deepspeed_worker)
        return
    folder = Path(tempfile.mkdtemp(prefix="unwall-bench-", dir=options.directory))
    try:
        report = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(report["text"])
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


def measure(options, folder):
    begin = time.perf_counter()
    training = Training(options.shape, options.tier, folder, options.tokens)
    training.steps(2)
    nbytes = 12 * sum(param.numel() for param in training.model.parameters())
    states = None if options.no_dcp else states_for(training.model)
    sample = min(nbytes, SAMPLE_BYTES)
    rows, read = {}, {}
    for number in range(options.rounds):
        if number and time.perf_counter() - begin > options.seconds:
            break
        part = {name: (sample, raw(folder / "raw", sample, write)) for name, write in DRIVE.items()}
        (folder / "raw").unlink()
        found, read = ours(training, folder / "ours", nbytes, options.parts.split(","))
        part |= found
        if states is not None:
            part |= theirs(states, folder / "theirs")
        for name, found in part.items():
            rows.setdefault(name, []).append(found)
        print(f"round {number + 1} done after {time.perf_counter() - begin:.0f} s", flush=True)
    del training, states
    found, note = ({}, "DeepSpeed: left out") if options.no_deepspeed else deepspeeds(folder / "deepspeed")
    rows |= {name: [row] for name, row in found.items()}
    taken = time.perf_counter() - begin
    what = f"{options.shape}, states on {options.tier}, {nbytes / 1e9:.1f} GB, {len(rows['save'])} rounds in {taken:.0f} s"
    note = "\n".join([*(f"{name:28} {times:6.2f} bytes read per byte loaded" for name, times in read.items()), note])
    return {"text": table(what, rows, note), "rows": rows, "ratios": ratios(rows), "read": read, "nbytes": nbytes}


DRIVE = {"drive write": True, "drive read": False}


def ratios(rows):
    """What the goals are about: each name with its value and what it should be."""
    rate = {name: statistics.median(nbytes / seconds for nbytes, seconds in found) for name, found in rows.items()}
    steps = f"{STEPS_BESIDE} steps, "
    pairs = {
        "save against the drive": ("save", "drive write", ">= 0.85"),
        "load against the drive": ("load", "drive read", ">= 0.85"),
        "load over against the drive": ("load over", "drive read", ">= 0.85, half of it without room"),
        "async: caller kept, share of a blocking save": ("save", "async: caller kept", "<= 0.05"),
        "async: steps beside it, times as long": (f"{steps}calm", f"{steps}beside a save", "about 1"),
        "save against dcp": ("save", "dcp save", "> 1"),
        "load against dcp": ("load", "dcp load", "> 1"),
        "caller kept against dcp async_save": ("async: caller kept", "dcp async: caller kept", "> 1"),
        "save against DeepSpeed": ("save", "deepspeed save", "> 1"),
    }
    return {
        name: (rate[one] / rate[other], goal) for name, (one, other, goal) in pairs.items() if one in rate and other in rate
    }


def table(what, rows, note):
    lines = ["", f"{what}, torch {torch.__version__}, {os.cpu_count()} cores"]
    for name, found in rows.items():
        seconds = statistics.median(seconds for _, seconds in found)
        rate = statistics.median(nbytes / seconds for nbytes, seconds in found)
        lines.append(f"{name:28} {found[0][0] / 1e9:6.1f} GB {seconds:8.3f} s  {rate / 1e9:8.2f} GB/s")
    lines += ["", *(f"{name:48} {value:6.2f}   goal {goal}" for name, (value, goal) in ratios(rows).items())]
    return "\n".join([*lines, *([note] if note else [])])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
