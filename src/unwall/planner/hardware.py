"""A machine as the planner sees it: bytes, link rates, matmul rates. Read from files, so that one need not have it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unwall.json_files import read_json
from unwall.planner.formulas import Ceilings
from unwall.tiers.sizes import parse_bytes

MACHINES = Path(__file__).parent / "machines"
BLOCK_SHARE = 0.64
"""The share of the matmul rate that training a transformer reaches: 505 of 785 TFLOP/s, recomputation counted, with our
reference workload on one H200."""
_DAY_S = 86_400
_BY_DTYPE = ("matmul_flops_per_s", "block_flops_per_s", "block_s_per_param")


class HardwareError(ValueError):
    """A machine that is unknown or wrongly described: says which field, what was got, and what to write instead."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One machine, or a cluster of equal ones. Rates are what is reached, not what a data sheet promises, where known."""

    name: str
    devices_per_node: int
    nodes: int = 1
    device_bytes: int
    """Memory of one device."""
    host_bytes: int
    """Memory of one node's host."""
    disk_bytes: int = 0
    """All fast drives of one node."""
    host_to_device_bytes_per_s: float
    """One device, the others idle."""
    device_to_host_bytes_per_s: float
    host_link_bytes_per_s: float | None = None
    """One device, both directions at once, in all. None: they do not disturb each other."""
    node_host_link_bytes_per_s: float | None = None
    """One direction, all devices of a node at once, in all. None: each keeps its own rate."""
    host_memory_bytes_per_s: float
    """One node's host memory under the fused update."""
    disk_read_bytes_per_s: float = 0
    """All drives of a node together; as are the next two."""
    disk_write_bytes_per_s: float = 0
    disk_both_bytes_per_s: float | None = None
    """Reads and writes at once, in all. None: they do not disturb each other."""
    disk_endurance_bytes: float | None = None
    """What may be written to a node's drives in their life. None: unknown."""
    collective_bytes_per_s: float = 0
    """One device to the others of its node. Zero: there are no others."""
    network_bytes_per_s: float = 0
    """One node to the others. Zero: there is no network."""
    matmul_flops_per_s: Mapping[str, float]
    """One device, by dtype (``bfloat16``, ``float16``, ``float32``). A dtype that is missing is one the device lacks."""
    block_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """What a transformer block reaches, forward and backward. Where it is missing, ``BLOCK_SHARE`` of the matmul rate."""
    block_s_per_param: Mapping[str, float] = field(default_factory=dict)
    """What forward takes for each parameter beside that, however few the tokens (weights read and rearranged)."""
    device_memory_bytes_per_s: float | None = None
    """One device's own memory. None: unknown, and taken to be no limit."""
    host_cores: int = 0
    """Of one node. Zero: unknown."""
    is_host: bool = False
    """The device is the host itself: no accelerator. Copies, updates and compute share its cores and its memory."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "nodes", "device_bytes", "host_bytes"):
            _positive(self.name, name, getattr(self, name), whole=True)
        for name in ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "host_memory_bytes_per_s"):
            _positive(self.name, name, getattr(self, name))
        for name in ("host_link", "node_host_link", "disk_both"):
            if (value := getattr(self, f"{name}_bytes_per_s")) is not None:
                _positive(self.name, f"{name}_bytes_per_s", value)
        for name in ("disk_bytes", "disk_read_bytes_per_s", "disk_write_bytes_per_s", "collective_bytes_per_s"):
            _not_negative(self.name, name, getattr(self, name))
        _not_negative(self.name, "network_bytes_per_s", self.network_bytes_per_s)
        if self.disk_endurance_bytes is not None:
            _positive(self.name, "disk_endurance_bytes", self.disk_endurance_bytes)
        if not self.matmul_flops_per_s:
            raise HardwareError(f"{self.name}: matmul_flops_per_s names no dtype; write {{'bfloat16': 4e14}}")
        for name in _BY_DTYPE:
            for dtype, rate in getattr(self, name).items():
                (_not_negative if name == "block_s_per_param" else _positive)(self.name, f"{name}[{dtype}]", rate)
        if self.device_memory_bytes_per_s is not None:
            _positive(self.name, "device_memory_bytes_per_s", self.device_memory_bytes_per_s)
        _not_negative(self.name, "host_cores", self.host_cores)
        if self.disk_bytes and not (self.disk_read_bytes_per_s and self.disk_write_bytes_per_s):
            raise HardwareError(f"{self.name}: has disk_bytes but no disk_read_bytes_per_s and disk_write_bytes_per_s")
        if self.nodes > 1 and not self.network_bytes_per_s:
            raise HardwareError(f"{self.name}: has {self.nodes} nodes but no network_bytes_per_s between them")
        for name in _BY_DTYPE:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.devices_per_node * self.nodes

    def with_nodes(self, nodes: int, devices_per_node: int | None = None) -> "Hardware":
        """The same machine, another number of it, or fewer of its devices in use."""
        used = self.devices_per_node if devices_per_node is None else devices_per_node
        if used > self.devices_per_node:
            has = f"{self.devices_per_node} device{'s' * (self.devices_per_node != 1)}"
            raise HardwareError(f"{self.name}: a node has {has}, asked for {used}; name the machine that is meant (--hardware)")
        return dataclasses.replace(self, nodes=nodes, devices_per_node=used)

    def flops_per_s(self, dtype: str) -> float:
        """One device's matmul rate."""
        if dtype not in self.matmul_flops_per_s:
            known = ", ".join(sorted(self.matmul_flops_per_s))
            raise HardwareError(f"{self.name}: has no matmul rate for {dtype}; it has {known}")
        return self.matmul_flops_per_s[dtype]

    def block_rate(self, dtype: str) -> float:
        """FLOPs per second that a transformer block reaches on one device."""
        return self.block_flops_per_s.get(dtype) or BLOCK_SHARE * self.flops_per_s(dtype)

    def ceilings(self, dtype: str = "bfloat16") -> Ceilings:
        """What each rank reaches when every device of the node is busy."""
        share = 1 / self.devices_per_node
        limit = float("inf") if self.node_host_link_bytes_per_s is None else self.node_host_link_bytes_per_s * share
        ways = [rate for rate in (self.host_link_bytes_per_s, 2 * limit) if rate is not None and rate != float("inf")]
        between = self.collective_bytes_per_s if self.devices_per_node > 1 else float("inf")
        inside, across = between, between
        if self.nodes > 1:  # a ring over all ranks crosses each node's network once, whatever the number of devices behind it
            between = min(between, self.network_bytes_per_s)
            across = self.network_bytes_per_s * share  # each device has a ring of its own
        return Ceilings(
            flops_per_s=self.flops_per_s(dtype),
            host_to_device_bytes_per_s=min(self.host_to_device_bytes_per_s, limit),
            device_to_host_bytes_per_s=min(self.device_to_host_bytes_per_s, limit),
            host_link_bytes_per_s=min(ways) if ways else None,
            host_memory_bytes_per_s=self.host_memory_bytes_per_s * share,
            disk_read_bytes_per_s=self.disk_read_bytes_per_s * share,
            disk_write_bytes_per_s=self.disk_write_bytes_per_s * share,
            disk_bytes_per_s=None if self.disk_both_bytes_per_s is None else self.disk_both_bytes_per_s * share,
            collective_bytes_per_s=0 if self.devices == 1 else between,
            near_bytes_per_s=0 if self.devices == 1 else between if self.devices_per_node == 1 else inside,
            across_bytes_per_s=0 if self.devices == 1 else across,
        )

    def disk_days(self, written_bytes: float, seconds: float) -> float | None:
        """Days until a node's drives are worn out when they take ``written_bytes`` every ``seconds``. None: unknown."""
        _positive(self.name, "written_bytes", written_bytes)
        _positive(self.name, "seconds", seconds)
        return None if self.disk_endurance_bytes is None else self.disk_endurance_bytes / (written_bytes / seconds * _DAY_S)

    def to_dict(self) -> dict[str, Any]:
        """As it is written to JSON; :func:`from_dict` reads it back."""
        found = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return found | {name: dict(getattr(self, name)) for name in _BY_DTYPE} | {"notes": list(self.notes)}


def names() -> tuple[str, ...]:
    """The machines that are described by files of this package."""
    return tuple(sorted(path.stem for path in MACHINES.glob("*.json")))


def load(name: str | Path) -> Hardware:
    """A machine by name (``"dgx-2"``), or from a JSON file of one's own."""
    path = Path(name)
    if path.suffix != ".json":
        path = MACHINES / f"{str(name).lower()}.json"
        if path.stem not in names():
            raise HardwareError(f"no machine is called {str(name)!r}; there are {', '.join(names())}, or give a .json file")
    return from_dict(read_json(path, HardwareError), str(path))


def from_dict(values: Any, what: str = "hardware") -> Hardware:
    """From the fields of :class:`Hardware`; byte counts may be written as ``"32GiB"``."""
    if not isinstance(values, dict):
        raise HardwareError(f"{what}: expected an object with the fields of Hardware, got {type(values).__name__}")
    known = {item.name: item for item in dataclasses.fields(Hardware)}
    if unknown := sorted(set(values) - set(known)):
        raise HardwareError(f"{what}: unknown field {', '.join(unknown)}; the fields are {', '.join(known)}")
    missing = [name for name, item in known.items() if name not in values and not _has_default(item)]
    if missing:
        raise HardwareError(f"{what}: {', '.join(missing)} is missing")
    read = dict(values)
    for name in ("device_bytes", "host_bytes", "disk_bytes", "disk_endurance_bytes"):
        if isinstance(read.get(name), str):
            try:
                read[name] = parse_bytes(read[name], f"{what}: {name}")
            except ValueError as error:
                raise HardwareError(str(error)) from error
    for name in _BY_DTYPE:
        if not isinstance(read.get(name, {}), Mapping):
            raise HardwareError(f"{what}: {name} maps a dtype to a rate, got {read[name]!r}")
    notes = read.get("notes", ())
    if isinstance(notes, str) or not all(isinstance(note, str) for note in notes):
        raise HardwareError(f"{what}: notes is a list of strings, got {notes!r}")
    return Hardware(**(read | {"notes": tuple(notes)}))


def _has_default(item: "dataclasses.Field[Any]") -> bool:
    return item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING


def _positive(machine: str, name: str, value: object, whole: bool = False) -> None:
    kind = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
        raise HardwareError(f"{machine}: {name} must be {kind} greater than zero, got {value!r}")


def _not_negative(machine: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise HardwareError(f"{machine}: {name} must be a number and not negative, got {value!r}")
