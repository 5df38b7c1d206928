"""How the ranks of a model talk about a checkpoint: over a group of their own, because a save may go on beside training."""

import atexit
import contextlib
import datetime
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unwall.checkpoint.errors import CheckpointError
from unwall.shards.collectives import Ranks, host_group

if TYPE_CHECKING:
    import torch.distributed as dist

TIMEOUT = datetime.timedelta(hours=1)
"""For the slowest rank to have written its part. A rank that died is noticed at once."""

_groups: "dict[dist.ProcessGroup, Any]" = {}
atexit.register(_groups.clear)  # see _let_go_of_groups in shards/collectives.py


class Meeting:
    """The ranks of one model. Made by all of them together; then any thread may use it, one at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self.rank = ranks.rank
        self.size = ranks.size
        self.all_failed = False
        """Whether the last ``agree`` has raised on every rank."""
        self._group: Any = None if ranks.size == 1 else _group(ranks)

    def every(self, thing: Any) -> list[Any]:
        """Every rank's object, by rank."""
        if self._group is None:
            return [thing]
        try:
            return [pickle.loads(part) for part in self._gathered(pickle.dumps(thing))]
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} waited for another rank to write or read its part of a checkpoint, and it did not answer: "
                f"did it fail? ({error})"
            ) from error

    def _gathered(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        sizes = torch.empty(self.size, dtype=torch.int64)
        self._group._allgather_base(sizes, torch.tensor([len(mine)])).wait()
        longest = int(sizes.max())
        whole = torch.empty(self.size * longest, dtype=torch.uint8)
        part = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
        self._group._allgather_base(whole, part).wait()
        return [row[:size].numpy().tobytes() for row, size in zip(whole.view(self.size, -1), sizes.tolist(), strict=True)]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Every rank does its own part; gives what each came to. What fails on one fails on all, as in ``agree``."""
        error: BaseException | None = None
        thing = None
        try:
            thing = work()
        except BaseException as failure:
            error = failure
        return self.agree(error, thing)

    def agree(self, error: BaseException | None, thing: Any = None) -> list[Any]:
        """Every rank's object, if all of them have one. Otherwise each rank raises its own error, or what the others' are."""
        self.all_failed = False
        answers = self.every((None if error is None else _told(error), thing))
        failed = [f"rank {rank}: {told[1]}" for rank, (told, _) in enumerate(answers) if told is not None]
        if error is None and failed:
            kind = next(told[0] for told, _ in answers if told is not None)
            kinds = {"OSError": OSError, "FileNotFoundError": FileNotFoundError}
            error = kinds.get(kind, CheckpointError)("; ".join(failed))
        if error is not None:
            self.all_failed = True
            raise error
        return [thing for _, thing in answers]

    def after_failure(self, thing: Any) -> dict[int, Any]:
        """Every rank's object once more, by rank, after all of them have failed. Where that is not so, or where one of them has
        gone since, this rank's own: nobody is waited for in vain."""
        if self.all_failed:
            with contextlib.suppress(CheckpointError):
                return dict(enumerate(self.every(thing)))
        return {self.rank: thing}


def _told(error: BaseException) -> tuple[str, str]:
    """What the others are told of an error: what kind it is, and its text with its notes."""
    kinds = ("FileNotFoundError", "OSError")
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in kinds), "")
    return kind, "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _group(ranks: Ranks) -> Any:
    """One for all models over the same ranks: each costs threads and sockets."""
    group = ranks._group
    assert group is not None
    if group not in _groups:
        _groups[group] = host_group(group, "checkpoints", TIMEOUT)
    return _groups[group]
