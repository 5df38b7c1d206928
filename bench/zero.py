"""unwall with everything on the device against plain PyTorch and FSDP2, in one run.

    python bench/zero.py                     # this machine: CPU with two gloo ranks (50m), or one GPU (1b and 3b)
    python bench/zero.py --shapes 1b --steps 8 --json results/zero.json

Each engine runs in processes of its own; its losses must agree with the first one's. ``plain`` is mixed precision by hand:
a bf16 model whose gradients are cast onto fp32 masters that a fused AdamW updates.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ENGINES = ("plain", "fsdp2", "unwall", "unwall-host", "unwall-host-noclip", "unwall-auto40")
CLIP = 1.0


def main() -> None:
    import torch

    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1b", "3b"] if gpu else ["50m"])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES[:3]) if gpu else ["fsdp2", "unwall"], choices=ENGINES)
    parser.add_argument("--ranks", type=int, default=1 if gpu else 2)
    parser.add_argument("--batch", type=int, default=8 if gpu else 2)
    parser.add_argument("--seq", type=int, default=2048 if gpu else 128)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=1, help="rounds over the engines, in turn; the best round counts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for shape in options.shapes:
        best: dict[str, dict] = {}
        for _ in range(options.repeats):
            for engine in options.engines:
                row = run_engine(engine, shape, options)
                if "error" in row or engine not in best or row["step_s"] < best[engine].get("step_s", float("inf")):
                    best[engine] = row
        rows += best.values()
    report(rows)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1))


def run_engine(engine: str, shape: str, options: argparse.Namespace) -> dict:
    """One engine in processes of its own. A failure is a row that says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(options.ranks):
        environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
        environment.update(RANK=str(rank), WORLD_SIZE=str(options.ranks), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        sizes = [str(options.batch), str(options.seq), str(options.steps)]
        command = [sys.executable, str(Path(__file__).parent / "zero_worker.py"), engine, shape, *sizes]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate() for process in processes]
    row = {"engine": engine, "shape": shape, "ranks": options.ranks, "batch": options.batch, "seq": options.seq}
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            return {**row, "error": errors.strip().splitlines()[-1] if errors.strip() else f"exit {process.returncode}"}
    return {**row, **json.loads(outputs[0][0].strip().splitlines()[-1])}


def report(rows: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("shape", "engine", "ranks", "s/step", "tokens/s", "TFLOP/s", "device GiB", "host GiB", "loss", "vs unwall")
    ours = {row["shape"]: row.get("step_s") for row in rows if row["engine"] == "unwall"}
    for row in rows:
        if "error" in row:
            table.add_row(row["shape"], row["engine"], str(row["ranks"]), row["error"])
            continue
        ratio = f"{row['step_s'] / ours[row['shape']]:.3f}" if ours.get(row["shape"]) else ""
        table.add_row(
            row["shape"], row["engine"], str(row["ranks"]), f"{row['step_s']:.4f}",
            f"{row['tokens_s']:.0f}", f"{row['tflops']:.1f}",
            f"{row['device_gib']:.1f}", f"{row['host_gib']:.1f}", f"{row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}", ratio,
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
