"""Writes docs/hardware.md and docs/hardware.svg: which bandwidth a machine needs for 90% efficiency, as the planner counts.

python -m bench.hardware [directory]
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bench.paper import SEQ, V100_FLOPS_PER_S
from bench.paper_tables import wrap
from unwall.planner import formulas
from unwall.planner.activations import activations_of
from unwall.planner.description import from_shape
from unwall.planner.hardware import Hardware, load
from unwall.planner.job import Job, Workload, make_job
from unwall.planner.outline import skeleton
from unwall.planner.predict import work_of
from unwall.plans import Plan
from unwall.svg import COLOURS, Picture

SHAPES = {"10B": "50x4096x32", "100B": "80x10240x128", "1T": "128x25600x256"}
SAMPLES = (1, 4, 16, 64)
SHARE = 0.9
MACHINE, RANKS = "8xh100", 8
ON_DISK = {"params": "disk", "grads": "disk", "optimizer": "disk", "disk": "disk"}
NEEDS = ("between devices", "host to device", "device to host", "host memory", "drive reads", "drive writes")


@dataclass(frozen=True)
class Need:
    """Bytes per second and device for ``SHARE`` of the compute rate, were this the only thing in the way."""

    overlapped: float
    apart: float
    """Where nothing is moved while something is computed, as ZeRO-Infinity's section 4 counts."""


@lru_cache(maxsize=32)
def _job(shape: str, on_disk: bool) -> Job:
    plan = Plan(**ON_DISK) if on_disk else Plan(params="host", optimizer="host")  # type: ignore[arg-type]
    load_of_each = Workload(batch=1, seq=SEQ, activations="host")
    job = make_job(skeleton(from_shape(shape)), plan, RANKS, load_of_each, None, None)
    return dataclasses.replace(job, plan=dataclasses.replace(plan, device_bytes=1))  # nothing stays from forward to backward


def needs(shape: str, samples: int, machine: Hardware) -> dict[str, Need]:
    """For each link, the host's memory and the drives."""
    load_of_each = Workload(batch=samples, seq=SEQ, activations="host")
    works = []
    for on_disk in (False, True):
        job = _job(shape, on_disk)
        scaled = make_activations(job, load_of_each)
        works.append(work_of(scaled))
    host, disk = works
    moved = {
        "between devices": host.collective_bytes, "host to device": host.host_to_device_bytes,
        "device to host": host.device_to_host_bytes, "host memory": host.host_memory_bytes, "drive reads": disk.disk_read_bytes,
        "drive writes": disk.disk_write_bytes,
    }  # fmt: skip
    compute_s = host.flops / machine.block_rate("bfloat16")
    return {name: need(nbytes, compute_s) for name, nbytes in moved.items()}


def make_activations(job: Job, load_of_each: Workload) -> Job:
    """The same job with another number of samples: groups and homes stay."""
    kept = activations_of(job.outline.description, load_of_each)
    return dataclasses.replace(job, workload=load_of_each, activations=kept)


def need(nbytes: float, compute_s: float) -> Need:
    """``bytes / rate <= compute / share`` overlapped; ``compute / (compute + bytes / rate) = share`` apart."""
    return Need(SHARE * nbytes / compute_s, SHARE / (1 - SHARE) * nbytes / compute_s)


def page() -> str:
    machine = load(MACHINE)
    rows, rate = [], machine.block_rate("bfloat16") / 1e12
    for name, shape in SHAPES.items():
        for samples in SAMPLES:
            found = needs(shape, samples, machine)
            cells = (f"{found[each].overlapped / 1e9:.3g} / {found[each].apart / 1e9:.3g}" for each in NEEDS)
            rows.append(f"| {name} | {samples} | " + " | ".join(cells) + " |")
    has = ceilings(machine)
    intro = f"""Written by `python -m bench.hardware`; do not edit. GB/s per device that {100 * SHARE:.0f}% of the compute rate
        needs on {RANKS} devices of {rate:.0f} TFLOP/s each (what a block is taken to reach on an H100),
        stage 3, {SEQ} tokens per sample, blocks recomputed from inputs on the host, bf16: first with everything moved
        while
        something is computed, then with nothing overlapped, which is ten times as much. Each column is for itself: the others
        are taken to be no limit. Parameters, gradients and states on the host; in the last two columns on drives.
        Nothing is simulated or measured here: a real step lies between the two numbers, because with clipping the update waits
        for the norm of all gradients, and the first group of a step is waited for."""
    formula = """The bytes are the planner's (`work_of` in `planner/predict.py`, which the engine's own groups and homes go
        into); compute is 8 FLOPs per parameter and token over the rate. Overlapped, a step may take `compute / 0.9`, so
        `rate = 0.9 *
        bytes / compute`. Apart, `efficiency = compute / (compute + bytes / rate)`, so `rate = 9 * bytes / compute`. Bytes and
        FLOPs both grow with the parameters, so the size of the model hardly matters: the samples per device do. Only inputs of
        blocks, which cross the host link, are fewer per FLOP in wider models. What a larger model changes is how many samples
        fit beside it, and how many devices its states are spread over: twice the devices need half of the rates of host and
        drives per device, and the same between devices."""
    lines = ["# What hardware is needed", "", *wrap(intro), "", f"| model | samples per device | {' | '.join(NEEDS)} |"]
    lines += ["|---" * (2 + len(NEEDS)) + "|", *rows, "", *wrap(has), "", "![Needed bandwidth](hardware.svg)", ""]
    lines += ["## The formula", "", *wrap(formula), "", "## Against the paper", "", *against_the_paper()]
    return "\n".join(lines) + "\n"


def ceilings(machine: Hardware) -> str:
    """What one machine has of it, and from which batch on that is enough."""
    rates = machine.ceilings("bfloat16")
    there = dict(zip(NEEDS, (
        rates.collective_bytes_per_s, rates.host_to_device_bytes_per_s, rates.device_to_host_bytes_per_s,
        rates.host_memory_bytes_per_s, rates.disk_read_bytes_per_s, rates.disk_write_bytes_per_s,
    ), strict=True))  # fmt: skip
    said = []
    for name, rate in there.items():
        enough = [samples for samples in range(1, 513) if needs(SHAPES["100B"], samples, machine)[name].overlapped <= rate]
        said.append(f"{name} {rate / 1e9:.3g} GB/s ({f'from {enough[0]} samples on' if enough else 'never'})")
    return f"""A node of {machine.name} has per device, with all {machine.devices_per_node} at work, and is good for 90% at
        100B:
        {", ".join(said)}."""


def against_the_paper() -> list[str]:
    """ZeRO-Infinity's own answers for a V100, and what our bytes give with the same formula."""
    psi, batch = 1e12, 2
    compute_s = formulas.step_flops(psi, batch, SEQ) / V100_FLOPS_PER_S
    states = formulas.bandwidth_for(SHARE, formulas.intensity_optimizer(batch, SEQ), V100_FLOPS_PER_S)
    ours = need(formulas.SPLIT_UPDATE_TRAFFIC_BYTES * psi, compute_s).apart
    params = formulas.bandwidth_for(0.5, formulas.intensity_params(1, SEQ), V100_FLOPS_PER_S)
    once = formulas.step_flops(psi, 1, SEQ) / V100_FLOPS_PER_S
    ours_params = 3 * formulas.HALF_BYTES * psi / once
    kept = formulas.bandwidth_for(0.5, formulas.intensity_checkpoints(2048), V100_FLOPS_PER_S)
    text = """The paper moves 32 bytes of optimizer state per parameter (16 read, 16 written) where the split master of bf16
        moves 26, and parameters three times and gradients once (8 bytes) where ours are gathered twice and reduced once (6: the
        recomputed forward finds its block there for backward). Inputs of blocks are counted alike."""
    return [
        "| question (V100, 70 TFLOP/s, nothing overlapped) | paper | its formula | our bytes |",
        "|---|---|---|---|",
        f"| optimizer states, 90% at 2 samples | 1.2 to 1.5 TB/s | {states / 1e12:.2f} TB/s | {ours / 1e12:.2f} TB/s |",
        f"| parameters and gradients, 50% at 1 sample | below 70 GB/s | {params / 1e9:.1f} GB/s | "
        f"{ours_params / 1e9:.1f} GB/s |",
        f"| inputs of blocks, 50% at hidden size 2K | below 2 GB/s | {kept / 1e9:.2f} GB/s | {kept / 1e9:.2f} GB/s |",
        "",
        *wrap(text),
    ]


WIDTH, HEIGHT, LEFT, TOP, GAP = 280, 240, 56, 60, 56
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def picture() -> str:
    """A panel for each size: samples per device across, GB/s down, both logarithmic."""
    machine, title = load(MACHINE), "GB/s per device for 90% of an H100's compute rate, overlapped (8 devices, 1024 tokens)"
    found = Picture(LEFT + len(SHAPES) * (WIDTH + GAP), HEIGHT + TOP + 130, title)
    low, high = 0.01, 1000.0
    for number, (name, shape) in enumerate(SHAPES.items()):
        left = LEFT + number * (WIDTH + GAP)

        def place(samples: float, rate: float, left: int = left) -> tuple[float, float]:
            down = math.log(min(max(rate, low), high) / low) / math.log(high / low)
            return left + WIDTH * math.log(samples) / math.log(BATCHES[-1]), TOP + HEIGHT * (1 - down)

        found.text(left, TOP - 10, name, bold=True)
        for power in range(-2, 4):
            y = place(1, 10.0**power)[1]
            found.line(left, y, left + WIDTH, y)
            found.text(left - 6, y + 4, f"{10.0**power:g}", anchor="end")
        for samples in BATCHES:
            x = place(samples, low)[0]
            found.line(x, TOP, x, TOP + HEIGHT)
            found.text(x, TOP + HEIGHT + 16, str(samples), anchor="middle")
        found.text(left + WIDTH / 2, TOP + HEIGHT + 34, "samples per device", anchor="middle")
        curves = {samples: needs(shape, samples, machine) for samples in BATCHES}
        for index, each in enumerate(NEEDS):
            points = [place(samples, curve[each].overlapped / 1e9) for samples, curve in curves.items()]
            found.curve(points, COLOURS[index], dashed=each.startswith("drive"))
            if number == 0:
                x, y = LEFT + (index % 3) * 200, TOP + HEIGHT + 60 + 18 * (index // 3)
                found.box(x, y - 10, 12, 12, COLOURS[index])
                found.text(x + 18, y, each + (" (dashed)" if each.startswith("drive") else ""))
    return str(found)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs"
    (folder / "hardware.svg").write_text(picture())
    (folder / "hardware.md").write_text(page())


if __name__ == "__main__":
    main()
