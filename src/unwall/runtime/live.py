"""The engines of this process that are alive."""

import weakref
from typing import Protocol

from unwall.runtime.backward import Backward
from unwall.runtime.forward import Forward
from unwall.shards.collectives import Ranks


class Passes(Protocol):
    """An engine, as far as its passes go."""

    ranks: Ranks
    forward: Forward
    backward: Backward


live: "weakref.WeakSet[Passes]" = weakref.WeakSet()


def forget_interrupted() -> None:
    """Passes that ended with an interrupt, of which nothing has told: where there are other ranks they hear of it now, before
    they meet at something else."""
    for engine in sorted(live, key=lambda engine: engine.ranks.control.model):
        if engine.ranks.size > 1:
            engine.forward.forget_interrupted()
            engine.backward.forget_interrupted()
