"""How the ranks of a model talk about a checkpoint: over a group of their own, because a save may go on beside training."""

import atexit
import datetime
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from unwall.checkpoint.errors import CheckpointError
from unwall.runtime.engine import Engine
from unwall.shards.collectives import Ranks

TIMEOUT = datetime.timedelta(hours=1)
"""For the slowest rank to have written its part. A rank that died is noticed at once."""

_groups: dict["dist.ProcessGroup", "dist.ProcessGroup"] = {}
atexit.register(_groups.clear)  # see _let_go_of_groups in shards/collectives.py


def together(engine: Engine, what: str) -> None:
    """All ranks have come to ``what``. DivergedError, instead of a hang, where one of them has not."""
    call: Callable[..., None] = engine.executor.together
    call(*([what] if inspect.signature(call).parameters else []))


class Meeting:
    """The ranks of one model. Made by all of them together; then any thread may use it, one at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self._group = None if ranks.size == 1 else _group(ranks)

    def every(self, thing: Any) -> list[Any]:
        """Every rank's object, by rank."""
        if self._group is None:
            return [thing]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, thing, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} waited for another rank to write or read its part of a checkpoint, and it did not answer: "
                f"did it fail? ({error})"
            ) from error
        return found

    def agree(self, error: BaseException | None, thing: Any = None) -> list[Any]:
        """Every rank's object, if all of them have one. Otherwise each rank raises its own error, or what the others' are."""
        answers = self.every((None if error is None else _told(error), thing))
        if error is not None:
            raise error
        failed = [f"rank {rank}: {told[1]}" for rank, (told, _) in enumerate(answers) if told is not None]
        if failed:
            kind = next(told[0] for told, _ in answers if told is not None)
            raise (OSError if kind == "OSError" else FileNotFoundError if kind == "FileNotFoundError" else CheckpointError)(
                "; ".join(failed)
            )
        return [thing for _, thing in answers]


def _told(error: BaseException) -> tuple[str, str]:
    """What the others are told of an error: what kind it is, and its text."""
    kinds = ("FileNotFoundError", "OSError")
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in kinds), "")
    return kind, f"{type(error).__name__}: {error}"


def _group(ranks: Ranks) -> "dist.ProcessGroup":
    """One for all models over the same ranks: each costs threads and sockets."""
    group = ranks._group
    assert group is not None
    if group not in _groups:
        members = dist.get_process_group_ranks(group)
        _groups[group] = dist.new_group(members, timeout=TIMEOUT, backend="gloo", use_local_synchronization=True)
    return _groups[group]
