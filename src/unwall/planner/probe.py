"""Measures this machine and remembers it: the hardware that plans for it are made with."""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from unwall.json_files import read_json
from unwall.planner import measure, remembered
from unwall.planner.hardware import Hardware, HardwareError, from_dict
from unwall.planner.pace import dtype_name
from unwall.tiers.device import default_device

VERSION = 1
"""The version of what is measured: raise it when an old file would be read wrongly."""
_ALL = [dtype_name(dtype) for dtype in measure.DTYPES]
Progress = Callable[[str, int, int], None]
"""Told what is measured next, its number, and how many there are."""


class ProbeError(RuntimeError):
    """The machine cannot be measured: says what was tried and what to do."""


def fingerprint() -> dict[str, Any]:
    """What makes this machine this machine, as far as the measurements go."""
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "version": VERSION,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "devices": devices,
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_file(found: dict[str, Any] | None = None) -> Path:
    """Where the measurements of this machine are kept."""
    key = hashlib.sha256(json.dumps(found or fingerprint(), sort_keys=True).encode()).hexdigest()[:16]
    return remembered.folder() / remembered.NAMES.format(key)


def probe(
    disk: str | Path | None = None,
    refresh: bool = False,
    progress: Progress | None = None,
    dtypes: Iterable[torch.dtype] = measure.DTYPES,
) -> Hardware:
    """This machine's ceilings, measured in a few seconds the first time and then remembered.

    ``disk``: a directory on the drive to measure. Without it the disk is left out, unless it was measured before.
    ``dtypes``: what will be computed in. The others are measured once they are asked for, or where none of these is known.
    ProbeError where that directory cannot be written.
    """
    path = cache_file()
    known = None if refresh else _read(path)
    directory = None if disk is None else _directory(disk)
    device = default_device()
    before: list[str] = [] if known is None else known.get("dtypes", _ALL)
    asked = [dtype for dtype in dtypes if dtype_name(dtype) not in before]
    tasks = _tasks(device, directory, asked)
    if known is not None:
        tasks = [(name, task) for name, task in tasks if name in _missing(known, directory, asked)]
        if not tasks:
            return from_dict(known["hardware"], str(path))
    values = {} if known is None else dict(known["hardware"])
    for number, (name, task) in enumerate(tasks):
        if progress is not None:
            progress(name, number, len(tasks))
        _add(values, task())
    if progress is not None:
        progress("done", len(tasks), len(tasks))
    done = [*before, *map(dtype_name, asked)]
    if not any(name in values["matmul_flops_per_s"] for name in done):
        others = [dtype for dtype in measure.DTYPES if dtype_name(dtype) not in done]
        for found in (_products(device, others), _blocks(device, others)):
            _add(values, found)
        done = _ALL
    for dtype, rate in values["block_flops_per_s"].items():  # a block is mostly products: what it reaches, they reach
        values["matmul_flops_per_s"][dtype] = max(rate, values["matmul_flops_per_s"].get(dtype, 0.0))
    hardware = from_dict(values | _sizes(device), "the probe")
    measured = str(directory) if directory is not None else known and known.get("disk_directory")
    content = {"fingerprint": fingerprint(), "disk_directory": measured, "dtypes": done, "hardware": hardware.to_dict()}
    _write(path, content)
    return hardware


def _add(values: dict[str, Any], found: dict[str, Any]) -> None:
    """Puts fields beside those that are known; rates of a dtype beside those of others."""
    for name, value in found.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value


def _missing(known: dict[str, Any], directory: Path | None, dtypes: list[torch.dtype]) -> set[str]:
    """What is asked for now and was not measured then: another disk or dtype, and collectives where there was one rank."""
    found = {"matmul", "blocks"} if dtypes else set()
    if directory is not None and known.get("disk_directory") != str(directory):
        found.add("disk")
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not known["hardware"].get("collective_bytes_per_s"):
        found.add("collectives")
    return found


def _tasks(
    device: torch.device, directory: Path | None, dtypes: list[torch.dtype]
) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    """(name, what measures it and gives fields of Hardware)."""

    def links() -> dict[str, Any]:
        there, back, both = measure.copies(device)
        return {
            "host_to_device_bytes_per_s": there, "device_to_host_bytes_per_s": back, "host_link_bytes_per_s": both,
        }  # fmt: skip

    def disk() -> dict[str, Any]:
        assert directory is not None
        try:
            read, written, both = measure.disk_rates(directory)
        except (OSError, RuntimeError) as error:
            raise ProbeError(f"the disk at {directory} cannot be measured: {error}") from error
        free = shutil.disk_usage(directory).free
        return {
            "disk_bytes": free, "disk_read_bytes_per_s": read, "disk_write_bytes_per_s": written, "disk_both_bytes_per_s": both,
        }  # fmt: skip

    tasks: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("links", links),
        ("host memory", lambda: {"host_memory_bytes_per_s": measure.update_rate(torch.get_num_threads())}),
        ("matmul", lambda: _products(device, dtypes)),
        ("blocks", lambda: _blocks(device, dtypes)),
        ("collectives", lambda: {"collective_bytes_per_s": measure.collective_rate(device)}),
    ]
    if device.type == "cuda":
        tasks.insert(1, ("device memory", lambda: {"device_memory_bytes_per_s": measure.device_memory_rate(device)}))
    return [*tasks, ("disk", disk)] if directory is not None else tasks


def _products(device: torch.device, dtypes: list[torch.dtype]) -> dict[str, Any]:
    found = ((dtype_name(dtype), measure.matmul_rate(dtype, device)) for dtype in dtypes)
    return {"matmul_flops_per_s": {name: value for name, value in found if value is not None}}


def _blocks(device: torch.device, dtypes: list[torch.dtype]) -> dict[str, Any]:
    able = dtypes if device.type == "cuda" else [dtype for dtype in dtypes if dtype is not torch.float16]
    found = {dtype_name(dtype): measure.block_rate(dtype, device) for dtype in able}
    good = {name: pair for name, pair in found.items() if pair is not None}
    return {
        "block_flops_per_s": {name: pair[0] for name, pair in good.items()},
        "block_s_per_param": {name: pair[1] for name, pair in good.items()},
    }


def _sizes(device: torch.device) -> dict[str, Any]:
    memory = psutil.virtual_memory().total
    on_host = device.type != "cuda"
    return {
        "name": "this machine",
        "devices_per_node": 1 if on_host else torch.cuda.device_count(),
        "device_bytes": memory if on_host else torch.cuda.get_device_properties(device).total_memory,
        "host_bytes": memory,
        "host_cores": len(os.sched_getaffinity(0)),
        "is_host": on_host,
        "notes": ["Measured by unwall.probe."],
    }


def _directory(disk: str | Path) -> Path:
    path = Path(disk).absolute()
    if not path.is_dir():
        raise ProbeError(f"{path} is not a directory: give one on the drive that is to be measured")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ProbeError(f"{path} cannot be written: the probe needs a directory in which it may make a file for a moment")
    needed = 2 * measure.DISK_BYTES
    if shutil.disk_usage(path).free < 2 * needed:
        raise ProbeError(f"{path} has too little room: the probe needs {needed >> 20} MiB for a moment")
    return path


def _read(path: Path) -> dict[str, Any] | None:
    """What was measured before, if it can be read: a broken file is measured again."""
    try:
        found = read_json(path, HardwareError)
        from_dict(found["hardware"])
    except (ValueError, KeyError, TypeError):  # HardwareError is a ValueError
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, content: dict[str, Any]) -> None:
    """Remembering is a convenience: where the folder cannot be written, the next call measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(content, indent=1))
        part.replace(path)
    except OSError:
        return
