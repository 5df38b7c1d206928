"""Writes docs/paper-tables.md, docs/efficiency.svg and docs/scaling.svg: published numbers beside what we compute.

python -m bench.paper_tables [directory]
"""

import math
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from bench import ends, paper
from unwall.planner import draw, formulas
from unwall.planner.hardware import BLOCK_SHARE, Hardware, load
from unwall.svg import COLOURS, Picture

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 220, 54, 46, 70


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs"
    (folder / "efficiency.svg").write_text(picture())
    points = ends.scaling()
    (folder / "scaling.svg").write_text(scaling_picture(points))
    (folder / "paper-tables.md").write_text(page(points))


def page(points: list[ends.ScalingPoint]) -> str:
    sections = (header(), zero(), infinity(), efficiency(), largest(), scaling(points), tiling(), missing())
    return "\n".join(line for section in sections for line in (*section, "")).rstrip() + "\n"


def wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 120, initial_indent=indent, subsequent_indent=" " * len(indent))


def header() -> list[str]:
    text = """Written by `python -m bench.paper_tables`; do not edit. The formulas are `src/unwall/planner/formulas.py`, the
        published numbers `bench/paper.py`; `tests/bench/test_paper.py` checks every cell. A cell shows the
        published number, then the computed one with two more digits. **t**: the computed number gives the printed digits when
        it is cut off instead of rounded."""
    return ["# Published numbers and ours", "", *wrap(text)]


def zero() -> list[str]:
    cells = list(paper.zero_cells())
    truncated = sum(cell.how == "truncated" for cell in cells)
    rounded = sum(cell.how == "rounded" for cell in cells)
    text = f"""{rounded} of {len(cells)} cells are the computed number rounded to the printed digits. {truncated}
        (all in the 128B
        and 1T columns) are cut off instead: 513.5 is printed as 513, 4046.875 as 4046. {
        len(cells) - rounded - truncated
    } differ
        otherwise."""
    return ["## ZeRO, table 1: model states per device, GB (1e9)", "", *grid("ranks", cells), "", *wrap(text)]


def infinity() -> list[str]:
    cells = list(paper.infinity_cells())
    rounded = sum(cell.how == "rounded" for cell in cells)
    return [
        "## ZeRO-Infinity, figure 2a: memory",
        "",
        "32 samples of 1024 tokens per node of 16 devices, a checkpoint per layer.",
        "",
        *grid("shape", cells),
        "",
        f"{rounded} of {len(cells)} cells are the computed number rounded to the printed digits.",
    ]


def grid(corner: str, cells: list[paper.Cell]) -> Iterable[str]:
    """Rows and columns in the order of the cells."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    yield f"| {corner} | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for row in dict.fromkeys(cell.row for cell in cells):
        shown = (show(cell) for cell in cells if cell.row == row)
        yield f"| {row} | " + " | ".join(shown) + " |"


def show(cell: paper.Cell) -> str:
    digits = len(cell.published.partition(".")[2]) + 2
    mark = {"rounded": "", "truncated": " **t**", "differs": " **differs**"}[cell.how]
    return f"{cell.published} / {cell.computed:.{digits}f}{mark}"


def efficiency() -> list[str]:
    rows = (
        f"| {point.statement} | {point.computed:.2f} {point.unit} | {'yes' if point.holds else 'no'} |"
        for point in paper.efficiency_points()
    )
    return [
        "## ZeRO-Infinity, section 4: efficiency on a V100 (70 TFLOP/s)",
        "",
        "| published | computed | holds |",
        "|---|---|---|",
        *rows,
        "",
        "![Efficiency against bandwidth](efficiency.svg)",
    ]


def largest() -> list[str]:
    machine = load("dgx-2")
    plain, reserved = paper.largest_on_dgx2(), paper.largest_on_dgx2(paper.DEEPSPEED_BUCKET_BYTES)
    ours = {name: ends.largest(name, machine) for name in paper.LARGEST_PARAMS}
    rows = []
    for name, published in paper.LARGEST_PARAMS.items():
        cells = (f"{sized(found[name])} | {found[name].params / published:.2f}" for found in (ours, plain, reserved))
        rows.append(f"| {name} | {published / 1e9:g}B | " + " | ".join(cells) + f" | {between(ours[name].params, published)} |")
    return [
        "## ZeRO-Infinity, figure 6a: the largest model on one DGX-2",
        "",
        "| system | published | planner's search | ratio | formulas only | ratio | formulas, 9 GB of buckets | ratio "
        "| between |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        *largest_text({name: found.params / paper.LARGEST_PARAMS[name] for name, found in ours.items()}),
    ]


def between(found: float, published: float) -> str:
    """Whether the published size fits, and the next published one does not."""
    larger = [size for size in (*paper.LARGEST_PARAMS.values(), paper.CLUSTER_PARAMS) if size > published]
    after = min(larger)
    return f"{published / 1e9:g}B fits, {after / 1e9:g}B does not" if published <= found < after else "no"


def largest_text(ratios: dict[str, float]) -> list[str]:
    cluster = load("dgx-2").with_nodes(paper.CLUSTER_NODES)
    whole, tiled = (paper.largest("Infinity, disk", cluster, tiles=tiles) for tiles in (1, 16))
    near = [name for name, ratio in ratios.items() if abs(ratio - 1) <= 0.25]
    search = f"""Planner's search: what our engine would hold, with its own groups, working sets and bytes per parameter (fp16:
        2 for the parameter, 4 master, 8 moments, 2 gradient, and 2 more on device and disk, because it may grow to fp32), and {
        ends_share()
    } of
        device and host memory. Shapes: hidden sizes in steps of an eighth, 32 to 256 times the number of layers. {len(near)} of
        {len(ratios)} are within 25%: {", ".join(near)}."""
    assumed = """Both: one sample of 1024 tokens per device; a checkpoint per layer, on the device, or on the host for Infinity;
        no vocabulary; 32 GiB per device, 1.5 TB of host memory, 28 TB of disk. Formulas only: 20 bytes of state per parameter
        as ZeRO-Infinity counts, all memory usable, hidden sizes that are multiples of 256. ZeRO-Offload keeps fp16 parameters
        whole on each device."""
    buckets = """ZeRO-3: neither the formulas nor our engine have large communication buffers. DeepSpeed's default buckets with
        overlap take 9 GB per device (2 buckets of 5e8 fp16 elements, 4.5 times over, says Hugging Face's guide to DeepSpeed);
        with them ZeRO-Offload and ZeRO-3 are within 7%. This was looked for after the gap was seen, and that the published runs
        used these sizes is not known: the size of the gap fits, no more. Another choice of ours is
        one sample per device, which figure 6a does not name: with the 2 of figure 2a (32 per node of 16 devices) our search
        finds 24.5B (46 x 6656), ratio 1.22, and 4 of 5 would be within 25%. But 32T on 32 nodes would not fit with 2, as their
        checkpoints take more than the hosts have, so the table stays at one. A third is that there is no vocabulary: with
        GPT-2's 50,257 on top (embedding, head and logits take memory, blocks alone are counted) our search finds 25.0B
        (124 x 4096), ratio 1.248, and 1.07, 1.12 and 1.10 in place of 1.21, 1.15 and 1.11: 4 of 5, just."""
    disk = f"""Infinity, disk: 28 TB hold 1.4T at 20 bytes and 1.55T at our engine's 18. The published 1T is what was trained,
        and is not shown to be a limit: it is also 1T per node on {paper.CLUSTER_NODES} nodes. Nothing in the formulas would
        bring it down to 1T, and activations and tiles have no part in it: inputs of blocks are on the host, the largest
        operator is 3 GB of 32."""
    steps = """The figure's sizes are those of models that were trained: 1.4B, 13B, 20B, 70B, 1T, and 32T on 32 nodes. Read as
        steps, each one fits in our search for its system and the next one does not ("between"), for all five. Read as limits,
        two are missed by more than 25%, both upwards. Whether the published runs stopped at a limit or at the next size that
        was written down is not said, so we change no constant to meet them; what remains unexplained is what filled the rest of
        the devices in the ZeRO-3 run and of the drives in the 1T run."""
    plain = """Plain data parallelism agrees because fp32 gradients are counted, too: with ZeRO's 16 bytes it would be 2.1B
        (ratio 1.52)."""
    many = f"""On {paper.CLUSTER_NODES} DGX-2, published 32T. Formulas: {sized(whole)} without tiling (the largest operator and
        the checkpoints on the host limit it), {sized(tiled)} with 16 tiles. Planner: {fits_words(cluster)}. So 32T fits, among
        these shapes, only with tiling (or tensor parallelism, which is not modelled here), and with inputs of blocks on the
        host: `Plan(tiles=9, activations="host")`. docs/planner.md has the dry run of it."""
    wrong = [*wrap(buckets, "- "), *wrap(disk, "- ")]
    parts = [*wrap(search), "", *wrap(assumed), "", "Where it does not agree within 25%:", "", *wrong]
    return [*parts, "", *wrap(steps), "", *wrap(plain), "", *wrap(many)]


def ends_share() -> str:
    from unwall.planner.candidates import DEVICE_SHARE, HOST_SHARE

    return f"{100 * DEVICE_SHARE:.0f}% and {100 * HOST_SHARE:.0f}%"


def fits_words(cluster: Hardware) -> str:
    layers, hidden = 398, 81920
    params = formulas.transformer_params(layers, hidden)
    shown = []
    for tiles in (1, 9):
        fits = ends.fits("Infinity, disk", layers, hidden, cluster, tiles)
        shown.append(f"{'fits' if fits else 'does not fit'} with {tiles} tile{'s' if tiles > 1 else ''}")
    return f"{params / 1e12:.1f}T ({layers} x {hidden}) {' and '.join(shown)}"


def scaling(points: list[ends.ScalingPoint]) -> list[str]:
    first, last = points[0], points[-1]
    gain = last.tflops / first.tflops
    text = f"""Published: better than linear scaling from 64 to 512 V100, because the memory and the bandwidth that states are
        spread over grow with the number of nodes while each device's compute stays. The simulation agrees in the direction:
        {gain:.3f} times the speed per device on {last.devices} of that on {first.devices}. The gain is small because our
        schedule hides most of the states' traffic behind {ends.SCALING_BATCH} samples' compute on the smaller machine, too (the
        batch is our choice). Compute is taken to reach {100 * BLOCK_SHARE:.0f}% of the 70 TFLOP/s, as on our H200, so the total
        of {last.tflops * last.devices / 1e3:.1f} PFLOP/s beside the published 25 says little. Activation checkpoints
        may be on the host (`activations="host"`)."""
    rows = []
    for point in points:
        assert point.plan.prediction is not None
        rows.append(
            f"| {point.devices} | {point.plan.name} | {point.plan.prediction.step_s:,.0f} | {point.tflops:.2f} | "
            f"{point.tflops * point.devices / 1e3:.2f} |"
        )
    return [
        "## ZeRO-Infinity: a model of 1T on 64 to 512 V100",
        "",
        f"{ends.SCALING_SHAPE.replace('x', ' x ')} heads, {ends.SCALING_BATCH} samples of {paper.SEQ} tokens per device; "
        "simulated, for each size the plan that the planner chooses.",
        "",
        "| V100 | plan | step s | TFLOP/s per device | PFLOP/s in all |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "![Scaling of 1T parameters](scaling.svg)",
        "",
        *wrap(text),
    ]


def scaling_picture(points: list[ends.ScalingPoint]) -> str:
    first = points[0]
    simulated = [(float(point.devices), point.tflops * point.devices / 1e3) for point in points]
    linear = [(float(point.devices), first.tflops * point.devices / 1e3) for point in points]
    lines = {"simulated": simulated, "linear from the smallest": linear}
    return draw.curves(
        "1T parameters on V100, 5 samples per device", "devices", "PFLOP/s in all", lines, dashed=("linear from the smallest",)
    )


def sized(found: paper.Largest) -> str:
    amount = f"{found.params / 1e12:.1f}T" if found.params >= 1e12 else f"{found.params / 1e9:.1f}B"
    return f"{amount} ({found.layers} x {found.hidden})"


def tiling() -> list[str]:
    rows = []
    for tiles, hidden in paper.TILING.items():
        sizes = (hidden, paper.largest_hidden(tiles, True), paper.largest_hidden(tiles, False))
        rows.append(f"| {tiles} | " + " | ".join(f"{size // 1024}K" for size in sizes) + " |")
    text = """Each way gives one of the two published numbers and misses the other by a factor of 2. The operator grows with the
        square of the hidden size, so 16 tiles allow 4 times the hidden size and not 8 times: no single rule of this kind gives
        both."""
    return [
        "## ZeRO-Infinity, figure 6b: hidden size when memory is in pieces of 2 GiB",
        "",
        "| tiles | published | value and gradient in one piece | each in its own |",
        "|---|---|---|---|",
        *rows,
        "",
        *wrap(text),
    ]


def missing() -> list[str]:
    text = """40 TFLOP/s of ZeRO-Offload at 10B (how much of the matmul rate a V100 reaches there is not known to us); 3D
        parallelism (20B), which needs a model of tensor and pipeline parallelism."""
    return ["## Not computed yet", "", *wrap(text)]


def picture() -> str:
    """Three panels side by side, efficiency against bandwidth, as in ZeRO-Infinity's figure 3."""
    batches = (1, 2, 4, 8, 16)
    params = [(f"{batch} samples", formulas.intensity_params(batch, paper.SEQ)) for batch in batches]
    optimizer = [(f"{batch} samples", formulas.intensity_optimizer(batch, paper.SEQ)) for batch in batches]
    checkpoints = [(f"hidden {size}K", formulas.intensity_checkpoints(size * 1024)) for size in (2, 8, 16, 32, 64)]
    panels = (
        ("parameters and gradients", 1e9, 1e12, params),
        ("optimizer states", 1e10, 1e13, optimizer),
        ("activation checkpoints", 1e8, 1e11, checkpoints),
    )
    title = "Efficiency on a V100 (70 TFLOP/s), 1024 tokens per sample, nothing overlapped"
    found = Picture(3 * (WIDTH + GAP) + 20, HEIGHT + TOP + 50, title)
    for index, (name, low, high, lines) in enumerate(panels):
        panel(found, LEFT + index * (WIDTH + GAP), name, (low, high), lines)
    return str(found)


def panel(found: Picture, left: int, title: str, rates: tuple[float, float], lines: list[tuple[str, float]]) -> None:
    low, high = rates

    def across(rate: float) -> float:
        return left + WIDTH * math.log(rate / low) / math.log(high / low)

    def down(share: float) -> float:
        return TOP + HEIGHT * (1 - share)

    found.text(left, TOP - 8, title, bold=True)
    for tenth in range(0, 11, 2):
        y = down(tenth / 10)
        found.line(left, y, left + WIDTH, y)
        found.text(left - 6, y + 4, f"{tenth * 10}%", anchor="end")
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x = across(10.0**power)
        found.line(x, TOP, x, TOP + HEIGHT)
        found.text(x, TOP + HEIGHT + 16, f"{10.0**power / 1e9:g}", anchor="middle")
    found.text(left + WIDTH / 2, TOP + HEIGHT + 36, "GB/s per device", anchor="middle")
    steps = [low * (high / low) ** (step / 60) for step in range(61)]
    for number, (name, intensity) in enumerate(lines):
        shares = [formulas.efficiency(intensity, rate, paper.V100_FLOPS_PER_S) for rate in steps]
        found.curve([(across(rate), down(share)) for rate, share in zip(steps, shares, strict=True)], COLOURS[number])
        found.text(left + WIDTH - 6, TOP + HEIGHT - 74 + 15 * number, name, anchor="end", fill=COLOURS[number])


if __name__ == "__main__":
    main()
