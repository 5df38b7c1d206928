"""The memory and bandwidth model of ZeRO and ZeRO-Infinity. Pure arithmetic: no torch, no machine.

Sources: ZeRO (arXiv 1910.02054), ZeRO-Infinity (arXiv 2104.07857). Parameters are counted in elements, ``batch`` in samples,
``seq`` in tokens per sample; given a device's batch the answer is for a device, given a node's for a node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

HALF_BYTES = 2
"""One fp16 or bf16 number: what forward and backward compute in."""
ZERO_K_BYTES = 12
"""ZeRO's K: fp32 master, momentum and variance of one parameter."""
INFINITY_STATE_BYTES = 20
"""ZeRO-Infinity's count for one parameter: K, and parameter and gradient in fp16, and the gradient once more in fp32."""
MASTER_UPDATE_TRAFFIC_BYTES = 28
"""Host memory traffic of one parameter's AdamW update with an fp32 master beside a bf16 copy."""
SPLIT_UPDATE_TRAFFIC_BYTES = 26
"""The same with the split master: reads g2 hi2 lo2 m4 v4, writes hi2 lo2 m4 v4."""
LEAN_UPDATE_TRAFFIC_BYTES = 12
"""The same with lean states: reads g2 hi2 lo1 mv2, writes hi2 lo1 mv2."""


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value!r}")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be greater than zero, got {value!r}")


def _check_stage(stage: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is 0, 1, 2 or 3, got {stage!r}")


# ZeRO, sections 5 and 7


def zero_state_bytes(params: float, ranks: int, stage: int, optimizer_bytes: float = ZERO_K_BYTES) -> float:
    """Model states on each device. ``optimizer_bytes`` is a parameter's optimizer state (ZeRO's K)."""
    _check_stage(stage)
    _check(params=params, optimizer_bytes=optimizer_bytes)
    _check_positive(ranks=ranks)
    sizes = (optimizer_bytes, HALF_BYTES, HALF_BYTES)  # in the order in which the stages cut them: optimizer, gradients, params
    return sum(params * size / (ranks if stage > position else 1) for position, size in enumerate(sizes))


def zero_volume_params(params: float, stage: int) -> float:
    """Parameters each rank sends in a step, for many ranks: all-reduce is 2, stage 3 gathers twice and reduces once."""
    _check_stage(stage)
    _check(params=params)
    return (3 if stage == 3 else 2) * params


# ZeRO-Infinity, section 3: memory


def transformer_params(layers: float, hidden: float) -> float:
    """Parameters of the blocks of a transformer (four matrices of ``hidden**2``, two of ``4 * hidden**2``)."""
    _check(layers=layers, hidden=hidden)
    return 12 * layers * hidden**2


def infinity_state_bytes(params: float) -> float:
    """Model states of the whole model, fp32 gradients among them."""
    _check(params=params)
    return INFINITY_STATE_BYTES * params


def checkpoint_bytes(batch: float, seq: float, hidden: float, layers: float, every: int = 1) -> float:
    """Activation checkpoints, one per ``every`` layers."""
    _check(batch=batch, seq=seq, hidden=hidden, layers=layers)
    _check_positive(every=every)
    return HALF_BYTES * batch * seq * hidden * layers / every


def activation_bytes(batch: float, seq: float, hidden: float, heads: float, layers: float) -> float:
    """All activations of ``layers`` layers, attention scores among them."""
    _check(batch=batch, seq=seq, hidden=hidden, heads=heads, layers=layers)
    return HALF_BYTES * batch * seq * layers * (16 * hidden + 2 * heads * seq)


def state_working_bytes(hidden: float) -> float:
    """The largest operator (``hidden`` to ``4 * hidden``), value and gradient: what a device must hold to run it whole."""
    _check(hidden=hidden)
    return 2 * HALF_BYTES * 4 * hidden**2


def activation_working_bytes(batch: float, seq: float, hidden: float, heads: float, every: int = 1) -> float:
    """What is recomputed between two activation checkpoints in backward."""
    _check_positive(every=every)
    return activation_bytes(batch, seq, hidden, heads, every)


# ZeRO-Infinity, section 4: bandwidth


def step_flops(params: float, batch: float, seq: float, recompute: bool = True) -> float:
    """FLOPs of an iteration: 2 per parameter and token forward, 4 backward, 2 more when forward is recomputed."""
    _check(params=params, batch=batch, seq=seq)
    return (8 if recompute else 6) * batch * seq * params


def intensity_params(batch: float, seq: float) -> float:
    """FLOPs for each byte of parameters and gradients moved."""
    _check(batch=batch, seq=seq)
    return seq * batch


def intensity_optimizer(batch: float, seq: float) -> float:
    """FLOPs for each byte of optimizer states moved."""
    _check(batch=batch, seq=seq)
    return seq * batch / 4


def intensity_checkpoints(hidden: float, every: int = 1) -> float:
    """FLOPs for each byte of activation checkpoints moved."""
    _check(hidden=hidden)
    _check_positive(every=every)
    return 24 * hidden * every


def efficiency(intensity: float, bytes_per_s: float, flops_per_s: float) -> float:
    """Share of the peak that is reached when moving and computing do not overlap."""
    _check(intensity=intensity, bytes_per_s=bytes_per_s)
    _check_positive(flops_per_s=flops_per_s)
    return intensity * bytes_per_s / (intensity * bytes_per_s + flops_per_s)


def bandwidth_for(share: float, intensity: float, flops_per_s: float) -> float:
    """Bytes per second that give this efficiency: the inverse of :func:`efficiency`."""
    if not 0 <= share < 1:
        raise ValueError(f"an efficiency is at least 0 and below 1, got {share!r}")
    _check_positive(intensity=intensity, flops_per_s=flops_per_s)
    return share / (1 - share) * flops_per_s / intensity


# One step's lower bound


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one rank does in one step."""

    flops: float = 0
    """Computed on the device, recomputation included."""
    host_to_device_bytes: float = 0
    device_to_host_bytes: float = 0
    host_memory_bytes: float = 0
    """Traffic of the update: ``SPLIT_UPDATE_TRAFFIC_BYTES`` (or ``MASTER_...``) for each parameter updated on the host."""
    disk_read_bytes: float = 0
    disk_write_bytes: float = 0
    collective_bytes: float = 0
    """From other ranks, in all."""
    near_bytes: float = 0
    """Of these, in collectives over the ranks of a node."""
    across_bytes: float = 0
    """Of these, in collectives over the ranks at one place of all nodes."""

    def __post_init__(self) -> None:
        _check(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one rank can reach, while all others do the same. Zero: the machine has no such thing."""

    flops_per_s: float
    host_to_device_bytes_per_s: float = 0
    device_to_host_bytes_per_s: float = 0
    host_link_bytes_per_s: float | None = None
    """Both directions of the host link at once, in all. None: they do not disturb each other."""
    host_memory_bytes_per_s: float = 0
    disk_read_bytes_per_s: float = 0
    disk_write_bytes_per_s: float = 0
    disk_bytes_per_s: float | None = None
    """Reads and writes at once, in all. None: they do not disturb each other."""
    collective_bytes_per_s: float = 0
    """Over all ranks."""
    near_bytes_per_s: float = 0
    """Over the ranks of a node."""
    across_bytes_per_s: float = 0
    """Over the ranks at one place of all nodes, all places at once."""

    def __post_init__(self) -> None:
        _check(**{field.name: getattr(self, field.name) or 0 for field in fields(self)})


@dataclass(frozen=True)
class Bound:
    """The least time a step can take when everything overlaps."""

    seconds: Mapping[str, float]
    """For each resource, were it the only one."""

    @property
    def limit(self) -> str:
        """The resource that sets the bound."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def step_s(self) -> float:
        return self.seconds[self.limit]


def lower_bound(work: StepWork, ceilings: Ceilings) -> Bound:
    """``max`` over the resources of work over ceiling."""
    both_links = work.host_to_device_bytes + work.device_to_host_bytes
    both_disk = work.disk_read_bytes + work.disk_write_bytes
    terms: dict[str, tuple[float, float | None]] = {
        "compute": (work.flops, ceilings.flops_per_s),
        "host to device": (work.host_to_device_bytes, ceilings.host_to_device_bytes_per_s),
        "device to host": (work.device_to_host_bytes, ceilings.device_to_host_bytes_per_s),
        "host link, both ways": (both_links, ceilings.host_link_bytes_per_s),
        "host memory": (work.host_memory_bytes, ceilings.host_memory_bytes_per_s),
        "disk reads": (work.disk_read_bytes, ceilings.disk_read_bytes_per_s),
        "disk writes": (work.disk_write_bytes, ceilings.disk_write_bytes_per_s),
        "disk, reads and writes": (both_disk, ceilings.disk_bytes_per_s),
        "collectives": (work.collective_bytes - work.near_bytes - work.across_bytes, ceilings.collective_bytes_per_s),
        "collectives in a node": (work.near_bytes, ceilings.near_bytes_per_s if work.near_bytes else None),
        "collectives across nodes": (work.across_bytes, ceilings.across_bytes_per_s if work.across_bytes else None),
    }
    seconds = {}
    for name, (amount, ceiling) in terms.items():
        if ceiling is None:
            continue
        if amount > 0 and ceiling == 0:
            raise ValueError(f"{name}: the step needs {amount:.3g} of it, but the machine has none (its rate is zero)")
        seconds[name] = amount / ceiling if amount else 0.0
    return Bound(seconds)
