"""A training step over a slow link, with bf16 and with small integers on it: ``python -m bench.compressed`` (as root).

Two network namespaces of this machine with a cable between them that ``tc`` slows down, one rank in each. The rows take turns,
and the best step of each counts, so that a machine that is busy now and then does not. Beside each stands what the planner
predicts with the rates that a probe of this machine and of the cable has found. On an idle machine it takes about a minute.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

NODES = ("uwbench0", "uwbench1")
PLACES: dict[str, Any] = {"params": "device", "optimizer": "device", "activations": "keep"}
ROWS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"gather_dtype": "int8", "reduce_dtype": "int8"},
    "int8, int4": {"gather_dtype": "int8", "reduce_dtype": "int4"},
}


def main() -> None:
    options = _arguments()
    if options.rank is not None:
        measure(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go
    with nodes(options.rate), contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())  # what is measured here is of half a machine
        processes = []
        for rank, node in enumerate(NODES):
            command = [
                "ip",
                "netns",
                "exec",
                node,
                sys.executable,
                "-m",
                "bench.compressed",
                *sys.argv[1:],
                "--rank",
                str(rank),
            ]
            address = {"GLOO_SOCKET_IFNAME": "cable", "MASTER_ADDR": "10.231.8.1", "MASTER_PORT": "29477"}
            folder = {"XDG_CACHE_HOME": str(Path(cache, node))}
            processes.append(subprocess.Popen(command, env={**os.environ, **address, **folder}))
            stack.callback(processes[-1].kill)
        for process in processes:
            if process.wait() != 0:
                sys.exit("a rank failed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc says it")
    parser.add_argument("--shape", default="125m", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="that are timed per row and round, after two that are not")
    return parser.parse_args()


@contextlib.contextmanager
def nodes(rate: str) -> Iterator[None]:
    """Two namespaces with a cable of ``rate`` between them."""
    try:
        for node in NODES:
            _run("ip", "netns", "add", node)
        _run("ip", "link", "add", "uwcable0", "type", "veth", "peer", "name", "uwcable1")
        for number, node in enumerate(NODES):
            _run("ip", "link", "set", f"uwcable{number}", "netns", node)
            _run("ip", "-n", node, "link", "set", f"uwcable{number}", "name", "cable")
            _run("ip", "-n", node, "addr", "add", f"10.231.8.{number + 1}/24", "dev", "cable")
            _run("ip", "-n", node, "link", "set", "cable", "up")
            _run("ip", "-n", node, "link", "set", "lo", "up")
            shaped = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
            _run("ip", "netns", "exec", node, "tc", "qdisc", "add", "dev", "cable", "root", *shaped)
        yield
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", node], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


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
    dist.init_process_group("gloo", rank=options.rank, world_size=len(NODES))
    shape = SHAPES[options.shape]
    machine = probe()
    best: dict[str, dict[str, float]] = {name: {"seconds": float("inf")} for name in ROWS}
    for _ in range(options.rounds):
        for name, fields in ROWS.items():
            found = _row(shape, fields, options)
            best[name] = min(best[name], found, key=lambda row: row["seconds"])
    for name, row in best.items() if options.rank == 0 else ():
        expected = predicted(ROWS[name], options, machine)
        said = {"faster": best["bf16"]["seconds"] / row["seconds"], "predicted": expected, "off": expected / row["seconds"] - 1}
        print(json.dumps({"row": name, **row, **{key: round(value, 2) for key, value in said.items()}}), flush=True)
    dist.destroy_process_group()


def predicted(fields: dict[str, Any], options: argparse.Namespace, machine: Hardware) -> float:
    """Seconds of a step, as the planner has it."""
    between = {"nodes": len(NODES), "devices_per_node": 1, "network_bytes_per_s": machine.collective_bytes_per_s}
    load = Workload(batch=options.batch, seq=options.seq, clip=False)
    outline = outline_of(build(SHAPES[options.shape], "meta"), options.shape)
    job = make_job(outline, unwall.Plan(**PLACES, **fields), len(NODES), load, None, None)
    return predict(job, dataclasses.replace(machine, **between)).step_s


def _row(shape: Any, fields: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    model = build(shape, "cpu")
    unwall.shard(model, unwall.Plan(**PLACES, **fields))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-4)
    ids, labels = batch_of(shape, options.batch, options.seq, torch.device("cpu"), options.rank)
    best: dict[str, float] = {"seconds": float("inf")}
    for number in range(2 + options.steps):
        dist.barrier()
        unwall.stats(model).reset()
        wire, begin = sent_bytes(), time.perf_counter()
        model(ids, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds, wire = time.perf_counter() - begin, sent_bytes() - wire
        found = unwall.stats(model).collectives
        counted = found["all_gather"].bytes + found["reduce_scatter"].bytes
        if number >= 2 and seconds < best["seconds"]:
            best = {"seconds": round(seconds, 3), "counted_MB": round(counted / 1e6, 1), "on_the_wire_MB": round(wire / 1e6, 1)}
    return best


if __name__ == "__main__":
    main()
