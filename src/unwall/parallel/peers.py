"""The ranks of a mesh that have ended: whoever waits for one of them, in whatever dimension, says which it was.

[Note: a dead rank]
A rank of a mesh waits for others in torch's own collectives, too: inside a tensor-parallel layer, between pipeline stages. What
these raise when another process has ended (a connection was closed) names nobody, and the ranks behind it see only that this
one has ended as well. So the first rank that knows writes down in the store who it was, by its place in the mesh, and everybody
tells that: as a note of an exception that ends the process, as the error of a pipeline's step, in waits of our own.

A wait that does not end at all although a rank of the mesh has (a device that spins on a dead peer, after its groups were
aborted) cannot be left by an exception: after ``PATIENCE`` looks at a thread that has not moved the process is ended, with the
error on stderr and exit code 1. That is what a launcher does as well, once it has seen one rank fail.
"""

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unwall.parallel.mesh import names_of
from unwall.shards.control import DivergedError
from unwall.shards.looking import LOOK_S
from unwall.shards.watch import ANSWER_S, CERTAIN

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine

PATIENCE = 30
"""After so many looks (twice a second) a thread that waits for a dead rank, and has not moved, is given up."""


class Peers:
    """All ranks of the mesh of one model. See [Note: a dead rank]."""

    def __init__(self, engine: "Engine", mesh: DeviceMesh) -> None:
        everyone = engine.everyone
        self._engine = weakref.ref(engine)
        self._watch = everyone.control.watch
        self._names = [_name(mesh, dist.get_global_rank(everyone._group, rank)) for rank in range(everyone.size)]  # type: ignore[arg-type]
        self._watch.names = self._names
        self._rank = everyone.rank
        around = [engine.ranks, everyone, *(dimension.ranks for dimension in engine.others.beyond)]
        self._watches = [ranks.control.watch for ranks in around if ranks.size > 1]
        self._dead_for = self._still_for = 0
        self._place: tuple[int, int] | None = None
        self._watch.onlookers.add(self)
        _live.add(self)
        _tell_at_the_end()

    def verdict(self, patience_s: float = 0.0) -> str:
        """Which rank of the mesh has ended, if one has. The others are told. ``patience_s``: for one that is about to."""
        until = time.monotonic() + patience_s
        while not self._watch.end:
            dead = self._watch.dead()
            self._watch.end = self._watch.end or self._watch._get("end")
            if dead and not self._watch.end:
                ended = " and ".join(self._names[rank] for rank in dead)
                self._tell(f"{ended} has ended, and the others cannot go on without it: start all ranks again")
            elif time.monotonic() >= until:
                return ""
            else:
                time.sleep(LOOK_S / 5)
        self._tell(self._watch.end)
        return self._watch.end

    def tell_failure(self, error: BaseException) -> None:
        """This rank is about to end."""
        self._tell(f"{self._names[self._rank]} has ended with {type(error).__name__}: {error}")

    def _tell(self, text: str) -> None:
        for watch in self._watches:
            watch.tell_end(text)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """What torch raises inside because of a rank that has ended names it."""
        try:
            yield
        except DivergedError:
            raise
        except RuntimeError as error:
            said = self.verdict(ANSWER_S)
            if said:
                raise DivergedError(f"{self._names[self._rank]} waited for another rank. {said}") from error
            raise

    def look(self) -> None:
        """On the thread that watches, twice a second."""
        self._dead_for = self._dead_for + 1 if self._watch.dead() else 0
        if self._dead_for >= CERTAIN:
            self.verdict()
        moved, self._place = self._place, self._waits()
        self._still_for = self._still_for + 1 if self._dead_for and self._place is not None and moved == self._place else 0
        if self._still_for >= PATIENCE:
            print(f"unwall: {self._names[self._rank]} waits for another rank. {self.verdict()}", file=sys.stderr, flush=True)
            os._exit(1)

    def _waits(self) -> tuple[int, int] | None:
        """Where the thread that uses the model is. None outside of a pass."""
        engine = self._engine()
        if engine is None or not (engine.forward.on_stack or engine.backward.running or engine.forward.long is not None):
            return None
        frame = sys._current_frames().get(engine.forward.thread)
        return None if frame is None else (id(frame), frame.f_lasti)


def _name(mesh: DeviceMesh, rank: int) -> str:
    where = (mesh.mesh == rank).nonzero()
    at = where[0].tolist() if len(where) else []
    return (
        f"rank {rank} of the mesh ({', '.join(f'{name} {number}' for name, number in zip(names_of(mesh), at, strict=False))})"
    )


_live: "weakref.WeakSet[Peers]" = weakref.WeakSet()
_before: Any = None


def _tell_at_the_end() -> None:
    """An exception that ends this process says who has ended before; if nobody has, the others are told what it was."""
    global _before
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _uncaught


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not hasattr(sys, "ps1"):  # at a prompt nothing ends
        for peers in list(_live):
            with contextlib.suppress(Exception):
                said = peers.verdict(ANSWER_S if isinstance(error, RuntimeError) else 0.0)
                if said and said not in str(error):
                    error.add_note(said)
                elif not said:
                    peers.tell_failure(error)
    _before(kind, error, trace)
