"""A step that met an out-of-memory, once more.

[Note: the step again]
What a step needs besides the blocks of the model (its loss, the gradient of the head) is only measured in the first steps, and
the engine cannot help with an out-of-memory there: none of its code runs then. The loop can. Gradients are forgotten, updates
that ran ahead of the step are taken back with them, random numbers are those of before, and in the next pass the engine holds
less. So the losses are those of a run that had room. Only on one rank: others may be behind collectives of this step.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from unwall.runtime.block_call import Generators
from unwall.runtime.try_again import make_room
from unwall.train.model import Trained

T = TypeVar("T")
TRIES = 4
"""Of one step. After each the engine leaves twice as much of the device free, a quarter at most."""


def with_room(passes: Callable[[], T], trained: Trained, say: Callable[[str], None]) -> T:
    """All passes of a step. See [Note: the step again]."""
    engine = trained.engine
    generators = Generators(engine.device.device)
    for tries_left in reversed(range(TRIES)):
        try:
            return passes()
        except torch.OutOfMemoryError as error:
            if not tries_left or engine.ranks.size > 1:
                raise
            said = str(error).partition(". ")[0]
        # Here, and not in the handler: the error holds the frames of the pass, and they hold what it computed.
        trained.optimizer.zero_grad()
        make_room(engine)
        generators.put_back()
        say(f"unwall: {said}; the step runs again, and less is kept on the device from now on")
    raise AssertionError("the last try returns or raises")
