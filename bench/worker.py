"""One rank of one engine: trains the workload and writes its row as JSON.

    python -m bench.worker --engine plain --shape tiny --batch 2 --seq 64     # one engine by hand

Several ranks are told apart by RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them.
"""

import argparse
import contextlib
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.engines import Job, NotInstalledError, Running
from bench.shapes import SHAPES
from bench.spec import parse_spec
from bench.workload import batch_of


def main() -> None:
    options = _arguments()
    _be_the_one_that_is_killed()
    try:
        row = measure(options)
    except NotInstalledError as error:
        row = {"status": "not installed", "error": str(error)}
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        # page-locked and ordinary host memory that is refused comes as a plain RuntimeError
        memory = memory or "out of memory" in text or "can't allocate memory" in text
        row = {"status": "out of memory" if memory else "crashed", "error": f"{type(error).__name__}: {text}"[:300]}
    text = json.dumps(row)
    print(text, flush=True)
    if options.row:
        options.row.write_text(text)
    sys.stderr.flush()
    # Not sys.exit: engines with threads and process groups can take long to shut down, which is not what is measured.
    # The code of an error tells the suite that the other ranks wait for this one in vain.
    os._exit(0 if row["status"] == "ok" else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm", type=int, default=2, help="1 or more")
    parser.add_argument("--scratch", type=Path, default=Path("scratch"))
    parser.add_argument("--row", type=Path, help="a file for the row; engines write to the standard output too")
    parser.add_argument("--profile", type=Path, help="a path without suffix for the time line of three more steps")
    parser.add_argument("--started", type=float, default=time.monotonic(), help="time.monotonic() when the process was started")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Builds the engine, runs the steps, and describes them."""
    spec, shape = parse_spec(options.engine), SHAPES[options.shape]
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = _device(world)
    if world > 1 or spec.engine.group:
        _process_group(device, spec.engine.backend, options.scratch)
    scratch = options.scratch / f"rank{rank}"
    scratch.mkdir(exist_ok=True)  # not its parents: where the run was stopped meanwhile, its folder is gone and stays so
    job = Job(
        shape=shape, device=device, batch=options.batch, clip=spec.clip, options=spec.options, scratch=scratch,
        data=batch_of(shape, options.batch, options.seq, device, seed=rank),
    )  # fmt: skip
    running = spec.engine.start(job)
    print(f"built, {time.monotonic() - options.started:.0f} s after the start", flush=True)
    row = _time(running, options, device)
    if options.profile and rank == 0 and world == 1:
        running.profile(options.profile)
    if device.type == "cuda":
        row["device_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        row["device_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return row | {
        "status": "ok",
        "host_peak_bytes": _own_peak_bytes(),
        "versions": {"engine": running.version, "torch": torch.__version__, "python": platform.python_version()},
    }


def _time(running: Running, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Each step is timed to its end on the device.

    [Note: trailing updates] An engine may leave its update to run beside the next step. Nothing waits for it between the
    steps, so every timed step pays for the one before it; what the last one leaves is in ``finish_s``.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    losses, times, first_step_s, before, busy = [], [], 0.0, _Written(), 0.0
    for index in range(options.warm + options.steps):
        if index == options.warm - 1:  # reading it may wait for an update, so one untimed step comes after
            before = _Written.of(running)
        if index == options.warm:
            busy = time.process_time()
        wait()
        start = time.perf_counter()
        loss = running.step()
        wait()
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
        print(f"step {index}: {times[-1]:.2f} s, loss {losses[-1]:.4f}", flush=True)  # the log's last line, if time runs out
        if index == 0:
            first_step_s = time.monotonic() - options.started
    start = time.perf_counter()
    running.finish()
    finish_s, busy = time.perf_counter() - start, time.process_time() - busy
    after = _Written.of(running)
    return {
        "first_step_s": first_step_s,
        "times_s": times[options.warm :],
        "warm_times_s": times[: options.warm],
        "finish_s": finish_s,
        "processor_s": busy / options.steps,
        "losses": losses,
        "disk_written_bytes": after.since(before, options.steps + 1),
    }


@dataclass(frozen=True)
class _Written:
    """Bytes on disk so far, by two counts."""

    engine: int | None = None
    kernel: int | None = None

    @classmethod
    def of(cls, running: Running) -> "_Written":
        try:
            lines = Path("/proc/self/io").read_text().splitlines()
        except OSError:
            lines = []
        kernel = next((int(line.split()[1]) for line in lines if line.startswith("write_bytes")), None)
        return cls(running.written_bytes(), kernel)

    def since(self, before: "_Written", steps: int) -> int | None:
        """Bytes per step: by the engine's own count, else by the kernel's."""
        if self.engine is not None:
            return (self.engine - (before.engine or 0)) // steps
        if self.kernel is not None and before.kernel is not None:
            return (self.kernel - before.kernel) // steps
        return None


def _own_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _device(world: int) -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    return torch.device("cpu")


def _process_group(device: torch.device, backend: str, scratch: Path) -> None:
    """The ranks meet in a file: a port that was free a moment before may be another's by now."""
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(scratch / "meet"), world) if world > 1 else dist.HashStore()
    dist.init_process_group(backend if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world)


def _be_the_one_that_is_killed() -> None:
    """When memory runs out the kernel should end this process and not the suite."""
    with contextlib.suppress(OSError):  # a sandbox may refuse it; then the kernel's own choice holds
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
