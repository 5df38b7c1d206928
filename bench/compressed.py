"""A training step over a slow link, with bf16 and with small integers on it: ``python -m bench.compressed`` (as root).

Two network namespaces of this machine with a cable between them that ``tc`` slows down, one rank in each. The namespaces are
this run's own, with all ports free. The rows take turns, every other round backwards. Of each row and round the median step
counts; ``seconds`` is the median of the rounds, and ``faster`` the median of what each round has found beside its own bf16. So
a machine that is busy now and then changes little, and ``rounds`` says how much. The ranks keep the memory that they free, as
an accelerator's allocator does: otherwise each step gets hundreds of MB from the kernel anew, page by page, on the very core
that the network needs. Beside them stands what the planner predicts
with the rates that a probe of this machine and of the cable has found. On an idle machine it takes about two minutes.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import unwall
from bench.shapes import SHAPES
from bench.workload import batch_of, build
from unwall.planner.hardware import Hardware
from unwall.planner.job import Workload, make_job
from unwall.planner.outline import outline_of
from unwall.planner.predict import predict
from unwall.planner.probe import probe

NODES = 2
PLACES: dict[str, Any] = {"params": "device", "optimizer": "device", "activations": "keep"}
ROWS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"gather_dtype": "int8", "reduce_dtype": "int8"},
    "int8, int4": {"gather_dtype": "int8", "reduce_dtype": "int4"},
}
KEEPS_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""For glibc."""


class Round(NamedTuple):
    """One row in one round: its median step, and what its last one has moved."""

    seconds: float
    counted_bytes: int
    wire_bytes: int


def main() -> None:
    options = _arguments()
    if options.rank is not None:
        measure(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go
    with nodes(options.rate) as names, contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())  # what is measured here is of half a machine
        processes = []
        for rank, node in enumerate(names):
            this = [sys.executable, "-m", "bench.compressed", *sys.argv[1:], "--rank", str(rank)]
            address = {"GLOO_SOCKET_IFNAME": "cable", "MASTER_ADDR": "10.231.8.1", "MASTER_PORT": "29477"}
            folder = {"XDG_CACHE_HOME": str(Path(cache, node))}
            process = subprocess.Popen(
                ["ip", "netns", "exec", node, *this], env={**os.environ, **KEEPS_MEMORY, **address, **folder}
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        while None in (ended := [process.poll() for process in processes]) and not any(ended):
            time.sleep(0.1)
        if any(ended):
            sys.exit("a rank failed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc says it")
    parser.add_argument("--shape", default="125m", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="that are timed per row and round, after two that are not")
    return parser.parse_args()


@contextlib.contextmanager
def nodes(rate: str) -> Iterator[list[str]]:
    """The names of two namespaces with a cable of ``rate`` between them. They are of this process alone."""
    names = [f"uwbench{os.getpid()}n{number}" for number in range(NODES)]
    try:
        for node in names:
            _run("ip", "netns", "add", node)
            folder = Path("/etc/netns", node)  # names are looked up in files: there is no server to ask, and asking takes long
            folder.mkdir(parents=True)
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            (folder / "hosts").write_text("127.0.0.1 localhost\n10.231.8.1 node0\n10.231.8.2 node1\n")
        _run("ip", "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, node in enumerate(names):
            _run("ip", "-n", node, "addr", "add", f"10.231.8.{number + 1}/24", "dev", "cable")
            _run("ip", "-n", node, "link", "set", "cable", "up")
            _run("ip", "-n", node, "link", "set", "lo", "up")
            shaped = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
            _run("ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", "cable", "root", *shaped)
        yield names
    finally:
        for node in names:
            subprocess.run(["ip", "netns", "del", node], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns", node), ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()} (namespaces need root, iproute2 and tc)")


def sent_bytes() -> int:
    """What has left this node over the cable, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "cable":
            return int(numbers.split()[8])
    return 0


def measure(options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=options.rank, world_size=NODES)
    shape = SHAPES[options.shape]
    machine = probe()
    found: dict[str, list[Round]] = {name: [] for name in ROWS}
    for number in range(options.rounds):
        for name in list(ROWS)[:: -1 if number % 2 else 1]:
            found[name].append(_row(shape, ROWS[name], options))
    for name, rounds in found.items() if options.rank == 0 else ():
        said = compared(rounds, found["bf16"], predicted(ROWS[name], options, machine))
        print(json.dumps({"row": name, **said}), flush=True)
    dist.destroy_process_group()


def compared(rounds: Sequence[Round], beside: Sequence[Round], expected_s: float) -> dict[str, Any]:
    """A row, and how much faster it was than ``beside`` in the same rounds."""
    seconds = statistics.median(each.seconds for each in rounds)
    faster = statistics.median(theirs.seconds / ours.seconds for ours, theirs in zip(rounds, beside, strict=True))
    return {
        "seconds": round(seconds, 3),
        "rounds": [round(each.seconds, 3) for each in rounds],
        "faster": round(faster, 2),
        "predicted": round(expected_s, 2),
        "off": round(expected_s / seconds - 1, 2),
        "counted_MB": round(rounds[-1].counted_bytes / 1e6, 1),
        "on_the_wire_MB": round(rounds[-1].wire_bytes / 1e6, 1),
    }


def predicted(fields: dict[str, Any], options: argparse.Namespace, machine: Hardware) -> float:
    """Seconds of a step, as the planner has it."""
    between = {"nodes": NODES, "devices_per_node": 1, "network_bytes_per_s": machine.collective_bytes_per_s}
    load = Workload(batch=options.batch, seq=options.seq, clip=False)
    outline = outline_of(build(SHAPES[options.shape], "meta"), options.shape)
    job = make_job(outline, unwall.Plan(**PLACES, **fields), NODES, load, None, None)
    return predict(job, dataclasses.replace(machine, **between)).step_s


def _row(shape: Any, fields: dict[str, Any], options: argparse.Namespace) -> Round:
    model = build(shape, "cpu")
    unwall.shard(model, unwall.Plan(**PLACES, **fields))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-4)
    ids, labels = batch_of(shape, options.batch, options.seq, torch.device("cpu"), options.rank)
    seconds: list[float] = []
    for _ in range(2 + options.steps):
        dist.barrier()
        unwall.stats(model).reset()
        wire, begin = sent_bytes(), time.perf_counter()
        model(ids, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
        wire = sent_bytes() - wire
    found = unwall.stats(model).collectives
    return Round(statistics.median(seconds[2:]), found["all_gather"].bytes + found["reduce_scatter"].bytes, wire)


if __name__ == "__main__":
    main()
