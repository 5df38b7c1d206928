"""Writes to parameters that an optimizer has updated in backward, ahead of its step: what is written would undo the update."""

from collections.abc import Iterable

from torch import nn

from unwall.runtime.engine import Engine

BETWEEN = "between backward() and step(), but update_in_backward=True has updated"


def refuse_early_write(engine: Engine, params: Iterable[nn.Parameter], what: str) -> None:
    """RuntimeError where one of them was. ``what`` writes, in a few words."""
    if all(guard() is None for guard in engine.audience.guards):
        return  # the optimizer is gone: no step will follow
    for param in params:
        for index, slot in engine.places.get(id(param), ()):
            if slot in engine.gradients[index].used:
                name = engine.groups[index].layout.slots[slot].name
                raise RuntimeError(f"{what} {BETWEEN} {name} already: write to it after step()")
