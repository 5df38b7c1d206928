"""Starts the ranks of one engine, watches them, and makes a row of whatever becomes of them."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.spec import Spec

_POLL_S = 0.2
"""Rarely enough not to be felt by an engine that uses every core."""
_GRACE_S = 5.0
"""How long the other ranks may go on when one has ended with an error: enough for them to write why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What every engine is given."""

    shape: str
    batch: int
    seq: int
    steps: int
    warm: int
    world: int
    timeout_s: float
    profile: Path | None = None
    """A folder for time lines."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a set of processes ended."""

    codes: list[int]
    """Exit codes; negative: the signal."""
    first_failed: int | None
    timed_out: bool
    peak_bytes: int
    """Highest sum of resident memory over the processes and their children, as sampled."""
    seconds: float


def run_engine(spec: Spec, case: Case, scratch: Path, logs: Path) -> dict[str, Any]:
    """One engine in processes of its own. A failure is a row that says so."""
    scratch.mkdir(parents=True, exist_ok=True)
    logs.mkdir(parents=True, exist_ok=True)
    try:
        return _run(spec, case, scratch, logs)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(spec: Spec, case: Case, scratch: Path, logs: Path) -> dict[str, Any]:
    rows = [scratch / f"row{rank}.json" for rank in range(case.world)]
    stem = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in f"{spec.text}.{case.shape}")
    files = [logs / f"{stem}.{rank}.log" for rank in range(case.world)]
    environments, commands = [], []
    port = _free_port()
    for rank in range(case.world):
        environments.append(_environment(rank, case.world, port))
        commands.append([
            sys.executable, "-m", "bench.worker", "--engine", spec.text, "--shape", case.shape, "--batch", str(case.batch),
            "--seq", str(case.seq), "--steps", str(case.steps), "--warm", str(case.warm), "--scratch", str(scratch),
            "--row", str(rows[rank]), "--started", str(time.monotonic()),
            *(["--profile", str(case.profile / stem)] if case.profile else []),
        ])  # fmt: skip
    ended = watch(commands, environments, files, case.timeout_s)
    row = {"engine": spec.text, "clip": spec.clip, "tier": spec.engine.tier, "shape": case.shape, "batch": case.batch}
    row |= {"seq": case.seq, "world": case.world, "steps": case.steps, "warm": case.warm}
    return row | outcome(ended, rows, files, case.timeout_s, scratch)


def watch(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], logs: Sequence[Path], timeout_s: float
) -> Ended:
    """Runs the commands beside each other until all have ended, one has failed, or the time is over. None is left running."""
    start = time.monotonic()
    outputs: list[IO[bytes]] = [log.open("wb") for log in logs]
    processes = [
        # A session of its own: then its group holds every process it starts, and all of them can be ended.
        subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        for command, environment, output in zip(commands, environments, outputs, strict=True)
    ]
    peak_bytes, first_failed, end_at, timed_out = 0, None, start + timeout_s, False
    try:
        while any(process.poll() is None for process in processes):
            peak_bytes = max(peak_bytes, sum(_resident_bytes(process.pid) for process in processes))
            failed = [index for index, process in enumerate(processes) if process.poll()]
            if failed and first_failed is None:
                first_failed, end_at = failed[0], min(end_at, time.monotonic() + _GRACE_S)
            if time.monotonic() > end_at:
                timed_out = first_failed is None
                break
            time.sleep(_POLL_S)
    finally:
        for process in processes:
            _end(process)
        for output in outputs:
            output.close()
    codes = [process.returncode for process in processes]
    if first_failed is None and not timed_out:
        first_failed = next((index for index, code in enumerate(codes) if code), None)
    return Ended(
        codes=codes, first_failed=first_failed, timed_out=timed_out, peak_bytes=peak_bytes, seconds=time.monotonic() - start
    )


def outcome(ended: Ended, rows: Sequence[Path], logs: Sequence[Path], timeout_s: float, scratch: Path) -> dict[str, Any]:
    """The rows of the ranks as one, or what went wrong."""
    found = [json.loads(path.read_text()) if path.exists() and path.stat().st_size else None for path in rows]
    peak = {"host_peak_bytes": ended.peak_bytes}
    # A rank that could say what went wrong knows more than its exit code or the time-out of those that waited for it.
    for row in found:
        if row is not None and row["status"] != "ok":
            return {**peak, **row, "error": _scrub(row["error"], scratch)}
    if ended.timed_out:
        return peak | {"status": "timed out", "error": f"no end after {timeout_s:g} s; {_last_line(logs[0], scratch)}"}
    if ended.first_failed is not None:
        code, last = ended.codes[ended.first_failed], _last_line(logs[ended.first_failed], scratch)
        if code == -signal.SIGKILL:
            return peak | {"status": "killed", "error": f"by signal 9, as when the host's memory runs out; {last}"}
        return peak | {"status": "crashed", "error": f"{_how(code)}; {last}"}
    ranks = [row for row in found if row is not None]
    if len(ranks) < len(rows):
        return peak | {"status": "crashed", "error": f"ended without a row; {_last_line(logs[found.index(None)], scratch)}"}
    return merge_ranks(ranks, ended.peak_bytes)


def merge_ranks(ranks: Sequence[dict[str, Any]], sampled_peak_bytes: int) -> dict[str, Any]:
    """Times and losses are rank 0's; bytes are those of all ranks, device bytes those of the rank with most."""
    row = dict(ranks[0])
    row["host_peak_bytes"] = max(sampled_peak_bytes, sum(rank["host_peak_bytes"] for rank in ranks))
    for key in ("device_peak_bytes", "device_reserved_bytes"):
        if key in row:
            row[key] = max(rank[key] for rank in ranks)
    row["processor_s"] = sum(rank["processor_s"] for rank in ranks)
    written = [rank["disk_written_bytes"] for rank in ranks]
    row["disk_written_bytes"] = None if None in written else sum(written)
    return row


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"by signal {-code} ({signal.Signals(-code).name})"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends what the process left running as well as itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    environment.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), PYTHONUNBUFFERED="1")
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if world > 1:  # libraries with an OpenMP of their own (DeepSpeed's AdamW) follow this and not torch's setting
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // world))
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process and of its children now. A process that ends meanwhile counts as nothing."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident_bytes(int(child)) for child in children)


def _last_line(log: Path, scratch: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"last line: {_scrub(lines[-1].strip()[:300], scratch)}" if lines else "it printed nothing"


def _scrub(text: str, scratch: Path) -> str:
    """Without the paths of this machine: rows are published."""
    for path, shown in (
        (str(scratch.resolve()), "SCRATCH"),
        (str(Path.cwd()), "."),
        (sys.prefix, "PYTHON"),
        (str(Path.home()), "~"),
    ):
        text = text.replace(path, shown)
    return text
