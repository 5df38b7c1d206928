"""Ranks that read or write files together: where one fails, all of them say so instead of waiting for it."""

from unwall.runtime.engine import Engine
from unwall.shards.collectives import Ranks


def begin(engine: Engine, what: str) -> None:
    """What all ranks do first, together: what was written to parameters by hand has gone to the shards."""
    engine.edge()
    engine.executor.together(what)


def agree(ranks: Ranks | None, error: BaseException | None, what: str) -> None:
    """Raises this rank's own error, or on the other ranks one that names it. All ranks call it together."""
    if ranks is None or ranks.size == 1:
        if error is not None:
            raise error
        return
    told = ranks.every(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(told):
        if message is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {message}")
