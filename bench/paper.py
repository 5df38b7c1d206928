"""The published tables of ZeRO, ZeRO-Offload and ZeRO-Infinity as data, and what the formulas give for the same cells.

[Note: largest models]
``largest`` searches all shapes whose hidden size is a multiple of 256 and 32 to 256 times the number of layers (the published
ones lie there up to 1T), and takes the largest whose bytes fit. Assumed: one sample of 1024 tokens per device, a checkpoint per
layer, no vocabulary, 20 bytes of state per parameter as ZeRO-Infinity counts (also for plain data parallelism and ZeRO-3), all
memory usable. ``reserve_bytes`` takes that much of each device away, for what the formulas do not name. ``tiles`` cuts the
largest operator.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from functools import partial

from unwall.planner import formulas
from unwall.planner.hardware import Hardware, load

KI, GIB, TIB = 2**10, 2**30, 2**40
V100_FLOPS_PER_S = 70e12
SEQ = 1024
DEEPSPEED_BUCKET_BYTES = 9e9
"""DeepSpeed's two buckets of 5e8 fp16 elements, 4.5 times over when communication overlaps (Hugging Face's DeepSpeed guide)."""

ZERO_SIZES = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
ZERO_TABLE: dict[int, tuple[str, ...]] = {
    1: ("120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"),
    4: ("52.5", "41.3", "30", "896", "704", "512", "7000", "5500", "4000"),
    16: ("35.6", "21.6", "7.5", "608", "368", "128", "4750", "2875", "1000"),
    64: ("31.4", "16.6", "1.88", "536", "284", "32", "4187", "2218", "250"),
    256: ("30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"),
    1024: ("30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6"),
}
"""ZeRO, table 1: GB (1e9) per device by ranks; for each size stages 1, 2, 3."""

INFINITY_TABLE: tuple[tuple[int, int, int, tuple[str, ...]], ...] = (
    (80, 10, 128, ("0.10", "1.83", "2.03", "0.05", "1.56", "1.63")),
    (100, 20, 160, ("0.50", "9.16", "3.91", "0.12", "6.25", "2.50")),
    (128, 25, 256, ("1.01", "18.31", "7.13", "0.20", "9.77", "3.56")),
    (195, 64, 512, ("10.05", "182.81", "24.38", "0.76", "64.00", "8.00")),
    (315, 160, 1024, ("101.47", "1845.70", "88.59", "3.08", "400.00", "18.00")),
)
"""ZeRO-Infinity, figure 2a: layers, hidden size in Ki, heads, and the printed columns."""
INFINITY_COLUMNS = (
    "parameters, T",
    "states, TiB",
    "activations, TiB/node",
    "checkpoints, TiB/node",
    "state working, GiB/device",
    "activation working, GiB/device",
)
INFINITY_NODE_BATCH, INFINITY_NODE_DEVICES = 32, 16

LARGEST_PARAMS = {"plain DP": 1.4e9, "ZeRO-Offload": 13e9, "ZeRO-3": 20e9, "Infinity, host": 70e9, "Infinity, disk": 1e12}
"""ZeRO-Infinity, figure 6a: the largest model trained on one DGX-2."""
CLUSTER_NODES, CLUSTER_PARAMS = 32, 32e12
"""ZeRO-Infinity: trained on this many DGX-2."""
TILING = {1: 8 * KI, 16: 64 * KI}
"""ZeRO-Infinity, figure 6b: tiles, and the largest hidden size when device memory is in pieces of 2 GiB."""
TILING_PIECE_BYTES = 2 * GIB


@dataclass(frozen=True)
class Cell:
    """A published number beside the computed one."""

    row: str
    column: str
    published: str
    """As printed."""
    computed: float

    @property
    def how(self) -> str:
        """``rounded`` or ``truncated``: how the computed number becomes the printed digits; ``differs`` when it does not."""
        printed = Decimal(self.published)
        for how, rounding in (("rounded", ROUND_HALF_UP), ("truncated", ROUND_DOWN)):
            if Decimal(repr(self.computed)).quantize(printed, rounding) == printed:
                return how
        return "differs"


@dataclass(frozen=True)
class Point:
    """A published statement about efficiency: at least, or at most, some number."""

    statement: str
    low: float
    high: float
    computed: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.low <= self.computed <= self.high


@dataclass(frozen=True)
class Largest:
    """The largest model that fits."""

    layers: int
    hidden: int

    @property
    def params(self) -> float:
        return formulas.transformer_params(self.layers, self.hidden)


def zero_cells() -> Iterator[Cell]:
    """ZeRO, table 1."""
    columns = [(name, stage) for name in ZERO_SIZES for stage in (1, 2, 3)]
    for ranks, printed in ZERO_TABLE.items():
        for (name, stage), published in zip(columns, printed, strict=True):
            computed = formulas.zero_state_bytes(ZERO_SIZES[name], ranks, stage) / 1e9
            yield Cell(str(ranks), f"{name} stage {stage}", published, computed)


def infinity_cells() -> Iterator[Cell]:
    """ZeRO-Infinity, figure 2a."""
    node, device = INFINITY_NODE_BATCH, INFINITY_NODE_BATCH / INFINITY_NODE_DEVICES
    for layers, hidden_ki, heads, printed in INFINITY_TABLE:
        hidden = hidden_ki * KI
        params = formulas.transformer_params(layers, hidden)
        computed = (
            params / 1e12,
            formulas.infinity_state_bytes(params) / TIB,
            formulas.activation_bytes(node, SEQ, hidden, heads, layers) / TIB,
            formulas.checkpoint_bytes(node, SEQ, hidden, layers) / TIB,
            formulas.state_working_bytes(hidden) / GIB,
            formulas.activation_working_bytes(device, SEQ, hidden, heads) / GIB,
        )
        for column, published, value in zip(INFINITY_COLUMNS, printed, computed, strict=True):
            yield Cell(f"{layers} x {hidden_ki}K, {heads} heads", column, published, value)


def efficiency_points() -> tuple[Point, ...]:
    """ZeRO-Infinity, section 4."""
    params = formulas.efficiency(formulas.intensity_params(1, SEQ), 70e9, V100_FLOPS_PER_S)
    optimizer = formulas.bandwidth_for(0.9, formulas.intensity_optimizer(2, SEQ), V100_FLOPS_PER_S)
    checkpoints = formulas.efficiency(formulas.intensity_checkpoints(2 * KI), 2e9, V100_FLOPS_PER_S)
    return (
        Point("parameters and gradients at 70 GB/s, 1 sample: over 50%", 50, 100, 100 * params, "%"),
        Point("optimizer states, 2 samples, 90%: needs 1.2 to 1.5 TB/s", 1.2, 1.5, optimizer / 1e12, "TB/s"),
        Point("activation checkpoints at 2 GB/s, hidden 2K: over 50%", 50, 100, 100 * checkpoints, "%"),
    )


def fits(system: str, layers: int, hidden: int, hardware: Hardware, reserve_bytes: float = 0, tiles: int = 1) -> bool:
    """Does this shape's every term fit? See [Note: largest models]."""
    params, heads, node_batch = formulas.transformer_params(layers, hidden), hidden // 128, hardware.devices_per_node
    states, working = formulas.infinity_state_bytes(params), formulas.state_working_bytes(hidden) / tiles
    device = reserve_bytes + formulas.activation_working_bytes(1, SEQ, hidden, heads)
    host = disk = 0.0
    if system in ("Infinity, host", "Infinity, disk"):  # checkpoints go to the host, states to one tier, in 1/nodes
        host += formulas.checkpoint_bytes(node_batch, SEQ, hidden, layers)
        device += working
        if system == "Infinity, host":
            host += states / hardware.nodes
        else:
            disk += states / hardware.nodes
    else:
        device += formulas.checkpoint_bytes(1, SEQ, hidden, layers)
        if system == "plain DP":
            device += states
        elif system == "ZeRO-Offload":  # fp16 parameters are whole on each device, gradients pass through
            device += formulas.HALF_BYTES * params + working / 2
            host += (formulas.INFINITY_STATE_BYTES - formulas.HALF_BYTES) * params / hardware.nodes
        elif system == "ZeRO-3":
            device += states / hardware.devices + working
        else:
            raise ValueError(f"system is one of {', '.join(LARGEST_PARAMS)}, got {system!r}")
    return device <= hardware.device_bytes and host <= hardware.host_bytes and disk <= hardware.disk_bytes


def largest(system: str, hardware: Hardware, reserve_bytes: float = 0, tiles: int = 1) -> Largest:
    """The largest shape that fits. See [Note: largest models]."""
    best = Largest(0, 0)
    for hidden in range(256, 256 * KI + 1, 256):
        # More layers never take less, so the number of layers can be bisected.
        good = partial(fits, system, hidden=hidden, hardware=hardware, reserve_bytes=reserve_bytes, tiles=tiles)
        layers = _most(good, max(1, hidden // 256), max(1, hidden // 32))
        if layers is not None:
            best = max(best, Largest(layers, hidden), key=lambda found: found.params)
    return best


def _most(good: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from ``low`` to ``high`` that is good, when all below it are."""
    if not good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def largest_on_dgx2(reserve_bytes: float = 0) -> dict[str, Largest]:
    """For each system; ``reserve_bytes`` only for those that gather and reduce in DeepSpeed's buckets."""
    machine = load("dgx-2")
    return {name: largest(name, machine, 0 if name == "plain DP" else reserve_bytes) for name in LARGEST_PARAMS}


def largest_hidden(tiles: int, together: bool) -> int:
    """The largest power of two as hidden size whose largest operator fits pieces of 2 GiB when cut into ``tiles``.

    ``together``: value and gradient of a tile lie in one piece; otherwise each has its own.
    """
    hidden = KI
    while formulas.state_working_bytes(2 * hidden) / (1 if together else 2) / tiles <= TILING_PIECE_BYTES:
        hidden *= 2
    return hidden
