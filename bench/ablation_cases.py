"""What ``bench/ablation.py`` measures: per machine the parts, and per part the processes with their rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ALL_ON = "all on"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One process: a model that is built once, and rows that take turns on it."""

    shape: str
    seq: int
    plan: Mapping[str, Any]
    batches: tuple[int, ...] = (1,)
    """Samples per step; the rows are measured with each."""
    rows: tuple[str, ...] = (ALL_ON,)
    """Names of ``SWITCHES`` (bench/switches.py), or any other name for what plan and optimizer say."""
    speculate: bool | str = True
    built: str = ""
    """The switch under which the model is built and trained."""
    keeps: bool = False
    """The model leaves its activations to the plan, instead of recomputing its blocks by itself."""
    link_bytes_per_s: float | None = None
    """What copies between device and host are held to, where both are the same memory."""
    warm: int = 10
    """Steps before the first row: eight that clip nothing make an update ahead of its step worth while."""
    within: tuple[str, str] | None = None
    """Device and host memory by which the largest model is judged, activations counted. None: the plan's own budgets, which
    are about states."""

    def named(self, *rows: str, **changes: Any) -> "Training":
        """The same in another process, with other rows."""
        return replace(self, rows=rows, **changes)


@dataclass(frozen=True)
class Part:
    """Rows that are held against the first of them."""

    title: str
    trainings: tuple[Training, ...] = ()
    layer: Mapping[str, Any] = field(default_factory=dict)
    """Instead: the arguments of ``bench.tiling.train`` for one huge layer."""
    ranks: Mapping[str, Any] = field(default_factory=dict)
    """Instead: the options of ``bench.owner``."""


def _schedule(base: Training, others: tuple[int, ...] = ()) -> tuple[Training, ...]:
    rows = (ALL_ON, "look-ahead 1", "prefetch off", "overlap off", "speculation off")
    return (
        replace(base, rows=rows, batches=(*base.batches, *others)),
        base.named("split master off", built="split master off"),
    )


def _journal(base: Training, title: str) -> Part:
    return Part(title, (base.named("journal", speculate="journal"), base.named("journal off", speculate="shadows")))


def _long(base: Training) -> tuple[Training, ...]:
    def of(activations: str, tiles: int | None) -> dict[str, Any]:
        return {"params": "host", "optimizer": "host", "activations": activations, "sequence_tiles": tiles}

    return (
        replace(base, plan=of("host", 16), rows=(ALL_ON,)),
        replace(base, plan=of("host", None), rows=("sequence tiles off",)),
        replace(base, plan=of("recompute", 16), rows=("activation offload off",)),
        replace(base, plan=of("recompute", None), rows=("both off",)),
        replace(base, plan=of("keep", None), rows=("both off, nothing recomputed",)),
    )


_HOST = {"params": "host", "optimizer": "host", "activations": "keep"}
_DISK = {"params": "disk", "optimizer": "disk", "activations": "keep", "disk": "scratch"}
"""The model recomputes its blocks by itself."""
_RATE = 1e9


def _tiny() -> dict[str, Part]:
    host = Training(shape="tiny", seq=16, plan=_HOST | {"device_bytes": "512KiB", "host_bytes": "8MiB"}, warm=9)
    disk = replace(host, plan=_DISK | {"device_bytes": "512KiB", "host_bytes": "16MiB", "disk_bytes": "16MiB"}, warm=2)
    return {
        "host": Part("States on the host", _schedule(host)),
        "journal": _journal(replace(host, plan=_HOST | {"device_bytes": "512KiB", "host_bytes": "4MiB"}), "The journal"),
        "disk": Part("States on disk", (disk.named(ALL_ON, "prefetch off", "overlap off"),)),
        "long": Part("Long samples", _long(Training(shape="tiny", seq=64, plan={}, keeps=True, warm=1))),
        "layer": Part("A huge layer", layer={"hidden": 1024, "tokens": 8, "steps": 1}),
        "ranks": Part("Ranks", ranks={"worlds": (2,), "shape": "tiny", "steps": 1, "rounds": 1}),
    }


def _cores() -> dict[str, Part]:
    host = Training(
        shape="50m", seq=64, plan=_HOST | {"device_bytes": "72MiB", "host_bytes": "2GiB"}, batches=(1,), link_bytes_per_s=_RATE
    )
    full = replace(host, plan=_HOST | {"device_bytes": "72MiB", "host_bytes": "680MiB"})
    disk = replace(
        host,
        plan=_DISK | {"device_bytes": "72MiB", "host_bytes": "512MiB", "disk_bytes": "4GiB"},
        link_bytes_per_s=None,
    )
    long = Training(shape="50m", seq=512, plan={}, keeps=True, warm=1, within=("256MiB", "8GiB"))
    return {
        "host": Part("States on the host, 50m, links of 1 GB/s", _schedule(host, (4,))),
        "journal": _journal(full, "States fill the host, 50m"),
        "disk": Part("States on disk, 50m", (disk.named(ALL_ON, "prefetch off", "overlap off", "speculation off"),)),
        "long": Part("One sample of 512 tokens, 50m", _long(long)),
        "layer": Part("One layer 2,048 to 8,192, 64 tokens", layer={"hidden": 2048, "tokens": 64, "steps": 3}),
        "ranks": Part(
            "Several ranks, 50m, links of 1 GB/s",
            ranks={"worlds": (2, 4), "shape": "50m", "rate": _RATE},
        ),
    }


def _h200() -> dict[str, Part]:
    host = Training(shape="3b", seq=2048, batches=(8,), plan=_HOST | {"device_bytes": "4GiB", "host_bytes": "90GiB"})
    full = replace(host, plan=_HOST | {"device_bytes": "9GiB", "host_bytes": "52GiB"})
    budgets = {"device_bytes": "1GiB", "host_bytes": "3GiB", "disk_bytes": "12GiB"}
    disk = Training(shape="350m", seq=2048, batches=(8,), plan=_DISK | budgets)
    long = Training(shape="1b", seq=32768, plan={}, keeps=True, warm=2, within=("24GiB", "100GiB"))
    return {
        "host": Part("States on the host, 3b", _schedule(host, (2,))),
        "journal": _journal(full, "States fill the host, 3b"),
        "disk": Part("States on disk, 350m", (disk.named(ALL_ON, "prefetch off", "overlap off", "speculation off"),)),
        "long": Part("One sample of 32,768 tokens, 1b", _long(long)),
        "layer": Part("One layer 8,192 to 32,768, 4,096 tokens", layer={"hidden": 8192, "tokens": 4096, "steps": 5}),
    }


SIZES = {"tiny": _tiny, "cores": _cores, "h200": _h200}
