"""What the other stages of a pipeline hold, by name: a checkpoint is of the whole model, a rank has some of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from unwall.checkpoint.meeting import Meeting
from unwall.checkpoint.names import names_of
from unwall.checkpoint.trained import Trained, check_optimizers
from unwall.runtime.engine import Engine


@dataclass(frozen=True)
class Stages:
    """Names on all ranks together, this one's among them."""

    peers: tuple[int, ...]
    """Who has the same layers as this rank, this one among them."""
    params: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    states: frozenset[str] = frozenset()
    """Modules with a state beside their tensors."""
    groups: Mapping[tuple[str, int], frozenset[str]] = field(default_factory=dict)
    """The parameters of each param group of each optimizer."""


def meet_stages(engine: Engine, meeting: Meeting, model: nn.Module, optimizers: object) -> Stages:
    """All ranks call it together. Without a pipeline nobody holds anything else."""
    if not engine.others.pipeline:
        return Stages(tuple(range(meeting.size)))

    def mine() -> tuple[tuple[int, ...], set[str], set[str], set[str], dict[tuple[str, int], set[str]]]:
        names = names_of(model, engine)
        every = {alias for name in names.params for alias in (name, *names.aliases.get(name, ()))}
        trained = check_optimizers(optimizers, engine)
        at = tuple(dimension.ranks.rank for dimension in engine.others.pipeline)
        return at, every, set(names.buffers), set(names.states), _groups(trained, names.of)

    answers = meeting.together(mine)
    peers = tuple(rank for rank, answer in enumerate(answers) if answer[0] == answers[meeting.rank][0])
    params, buffers, states = (frozenset().union(*(answer[kind] for answer in answers)) for kind in (1, 2, 3))
    keys = {key for answer in answers for key in answer[4]}
    groups = {key: frozenset().union(*(answer[4].get(key, ()) for answer in answers)) for key in keys}
    return Stages(peers, params, buffers, states, groups)


def _groups(trained: Trained, names: dict[int, str]) -> dict[tuple[str, int], set[str]]:
    return {
        (name, number): {names[id(param)] for param in group["params"]}
        for name, optimizer in trained.items()
        for number, group in enumerate(optimizer.param_groups)
    }
