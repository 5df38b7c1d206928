"""The engines the suite compares. Each file here has one function, ``start``, that builds the model and returns its step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.shapes import Shape

if TYPE_CHECKING:  # the suite's own process needs no torch
    import torch

Tier = Literal["device", "host", "disk", "auto"]


class NotInstalledError(Exception):
    """The engine's package cannot be imported here."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank has to train."""

    shape: Shape
    device: "torch.device"
    data: "tuple[torch.Tensor, torch.Tensor]"
    batch: int
    clip: float | None
    options: Mapping[str, str]
    """The engine's fixed settings and what was written behind the colon of its name."""
    scratch: Path
    """An empty folder of this rank on the disk that is to be used. The harness removes it."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """An engine with a model in it."""

    step: "Callable[[], torch.Tensor]"
    """Forward, backward and update; returns the loss, detached."""
    version: str
    written_bytes: Callable[[], int | None] = lambda: None
    """Bytes this rank wrote to disk so far, as counted by the engine. None: it does not count."""
    profile: Callable[[Path], None] = lambda _: None
    """Runs a few more steps and writes their time line beside the given path (``.svg`` and ``.json``), if the engine can."""
    finish: Callable[[], None] = lambda: None
    """Waits for what the last step left to run beside the next one."""


@dataclass(frozen=True)
class Engine:
    """An entry of the table below."""

    module: str
    tier: Tier
    """Where the optimizer state lives; decides which lower bound applies."""
    settings: Mapping[str, str] = field(default_factory=dict)
    accepts: frozenset[str] | None = frozenset()
    """Options that may follow the name besides ``clip``. None: the engine checks them itself."""
    group: bool = False
    """Needs a process group for one rank too."""
    backend: str = "cpu:gloo,cuda:nccl"
    """Of the process group on an accelerator."""

    def start(self, job: Job) -> Running:
        running: Running = import_module(f"bench.engines.{self.module}").start(job)
        return running


_DEEPSPEED: dict[str, Any] = {
    "accepts": frozenset({"sub_group_size", "pipeline", "buffer_count"}),
    "group": True,
    "backend": "nccl",  # what it asks for itself
}
_ON_HOST = {"params": "host", "optimizer": "host"}
_ON_DISK = {"disk": "scratch"}

ENGINES: dict[str, Engine] = {
    "plain": Engine("plain", "device", accepts=frozenset({"recompute", "compile"})),
    "fsdp2": Engine("fsdp2", "device", group=True),
    "fsdp2-offload": Engine("fsdp2", "host", {"offload": "1"}, group=True),
    "deepspeed": Engine("deepspeed", "device", **_DEEPSPEED),
    "deepspeed-host": Engine("deepspeed", "host", {"offload": "cpu"}, **_DEEPSPEED),
    "deepspeed-nvme": Engine("deepspeed", "disk", {"offload": "nvme"}, **_DEEPSPEED),
    "torchao": Engine("torchao", "host", group=True),
    "unwall": Engine("unwall", "device", {"params": "device", "optimizer": "device"}, accepts=None),
    "unwall-host": Engine("unwall", "host", _ON_HOST, accepts=None),
    "unwall-disk": Engine("unwall", "disk", _ON_DISK, accepts=None),
    "unwall-auto": Engine("unwall", "auto", accepts=None),
}


def require(module: str) -> Any:
    """A module of a package that may not be installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise NotInstalledError(f"{module} cannot be imported: {error}") from error


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "from the source tree"
