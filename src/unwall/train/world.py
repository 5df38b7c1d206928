"""The ranks of a run: those that torchrun or ``--nproc`` started, or this process alone."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from unwall.shards.collectives import Ranks
from unwall.tiers.device import default_device
from unwall.train.errors import TrainError
from unwall.train.launch import LISTENER, STARTED

Made = TypeVar("Made")
_JOIN = timedelta(minutes=30)
"""torch's own limit for ranks that meet."""


class ToldElsewhereError(RuntimeError):
    """Another rank says what is wrong: this one ends without a word."""


def size_of_world() -> tuple[int, int, int]:
    """Rank, ranks, and ranks of this node, as the launcher says."""
    found = []
    for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))):
        said = os.environ.get(name, default)
        if not said.isdigit():
            raise TrainError(f"{name} is {said!r} in the environment, expected a number: torchrun sets it; unset it")
        found.append(int(said))
    return found[0], found[1], found[2]


@contextmanager
def one_voice() -> Iterator[None]:
    """Before the ranks of a node meet, all of them find the same mistakes: only the first one speaks."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise ToldElsewhereError("another rank says it") from error
        raise


def join_world() -> Ranks:
    """The process group, where there are several ranks."""
    rank, size, _ = size_of_world()
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        return Ranks(None, device.type)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if STARTED in os.environ:
            dist.init_process_group(backend, store=_meeting_place(rank, size), rank=rank, world_size=size)
        else:
            dist.init_process_group(backend)
    return Ranks(dist.group.WORLD, device.type)


def _meeting_place(rank: int, size: int) -> Store:
    """Where the ranks of ``--nproc`` meet: rank 0 keeps it, at the socket that the launcher handed down."""
    handed = os.environ.pop(LISTENER, None)
    socket = None if handed is None else int(handed)
    if socket is not None:
        os.set_inheritable(socket, False)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, size, is_master=rank == 0, timeout=_JOIN, master_listen_fd=socket)


def leave_world(ranks: Ranks) -> None:
    """All ranks have come to the end."""
    if ranks.size > 1:
        ranks.every(None)


def together(ranks: Ranks, act: Callable[[], Made]) -> Made:
    """Does the same on all ranks. Where it fails on one, all end: the lowest of those that failed says why."""
    error: Exception | None = None
    made: Made | None = None
    try:
        made = act()
    except Exception as found:
        error = found
    if ranks.size > 1:
        failed = ranks.every(error is not None)
        if any(failed) and failed.index(True) != ranks.rank:
            raise ToldElsewhereError("another rank failed")
    if error is not None:
        raise error
    return made  # type: ignore[return-value]
