"""What a result was measured on and with."""

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def describe(commit: str | None) -> dict[str, Any]:
    """The machine without its name, the date, the commit, and how busy the machine is now."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": _devices(),
        "kernel": platform.release(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or _commit(),
        "load": os.getloadavg()[0],
    }


def probe(disk: Path | None) -> dict[str, float]:
    """Measured speeds; nothing if they cannot be measured here."""
    command = [sys.executable, "-m", "bench.probe", *(["--disk", str(disk)] if disk else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"the machine's speeds could not be measured: {error}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _devices() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _commit() -> str | None:
    """None: no git here, as on a machine that was only sent the files."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=20, check=True)
        state = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return head.stdout.strip() + (" and changes" if state.stdout.strip() else "")
