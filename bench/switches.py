"""Techniques of the engine that can be switched off for a while, to measure what each is worth (``bench/ablation.py``).

They are replaced from outside, in this process alone, so that the engine carries no knob for it and its hot path no question.
What a step computes stays the same, bit by bit, with one exception: ``whole_master`` rounds parameters that lie half way
between two bf16 numbers to the even one, where a split master rounds away from zero.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from unwall.optim.early import EarlyUpdates
from unwall.schedule import executor
from unwall.shards import master, states
from unwall.shards.collectives import Ranks
from unwall.shards.group import Group
from unwall.shards.states import MASTER, StateSpec
from unwall.tiers.disk import DiskTier
from unwall.tiers.links import Links


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def no_overlap() -> Iterator[None]:
    """Every copy, every request to the disk and every collective is waited for where it is asked for, and updates run at the
    step. (Whoever steps waits for the update, too: ``bench/ablation.py`` does.)"""
    copy, read, write, begun = Links.copy, DiskTier.read, DiskTier.write, Ranks._begun

    def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
        def done(*args: Any, **options: Any) -> Any:
            found = call(*args, **options)
            for ticket in found if isinstance(found, list) else [found]:
                ticket.wait()
            return found

        return done

    with ExitStack() as stack:
        for owner, call in ((Links, copy), (DiskTier, read), (DiskTier, write), (Ranks, begun)):
            stack.enter_context(replaced(owner, call.__name__, waiting(call)))
        stack.enter_context(no_speculation())
        yield


def look_ahead(groups: int) -> AbstractContextManager[None]:
    """So many groups are fetched ahead at most; 0: none, each is fetched when it is used."""
    return replaced(executor, "LOOK_AHEAD", groups)


def no_speculation() -> AbstractContextManager[None]:
    """Nothing is updated before its step, neither out of place nor with a journal."""
    return replaced(EarlyUpdates, "wanted", lambda _: False)


@contextmanager
def whole_master() -> Iterator[None]:
    """bf16 parameters have an fp32 master beside them, 6 bytes in all, instead of a remainder, 4 bytes in all. To be entered
    before the model is sharded, and left when it is gone."""
    specs, write = states.master_specs, master.write_master

    def with_master(dtype: torch.dtype, lean: bool = False) -> tuple[StateSpec, ...]:
        return (MASTER,) if dtype is torch.bfloat16 and not lean else specs(dtype, lean)

    def write_both(group: Group, start: int, values: torch.Tensor) -> None:
        if not group.has_state(MASTER):
            write(group, start, values)
            return
        span = slice(start, start + values.numel())
        group.state(MASTER)[span].copy_(values)
        group.own_param[span].copy_(values)

    with ExitStack() as stack:
        for before, after in ((specs, with_master), (write, write_both)):
            for module in [found for name, found in sys.modules.items() if name.startswith("unwall.")]:
                for name in [name for name, value in vars(module).items() if value is before]:
                    stack.enter_context(replaced(module, name, after))
        yield


SWITCHES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "overlap off": no_overlap,
    "prefetch off": lambda: look_ahead(0),
    "look-ahead 1": lambda: look_ahead(1),
    "speculation off": no_speculation,
    "split master off": whole_master,
}
