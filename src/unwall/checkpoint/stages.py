"""What the other stages of a pipeline hold, by name: a checkpoint is of the whole model, a rank has some of its layers."""

from dataclasses import dataclass

from torch import nn

from unwall.checkpoint.meeting import Meeting
from unwall.checkpoint.names import names_of
from unwall.checkpoint.optimizer_entry import check_optimizer
from unwall.optim.sharded import ShardedOptimizer
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
    groups: tuple[frozenset[str], ...] = ()
    """The parameters of each param group of the optimizer."""

    def group(self, number: int) -> frozenset[str]:
        return self.groups[number] if number < len(self.groups) else frozenset()


def meet_stages(engine: Engine, meeting: Meeting, model: nn.Module, optimizer: object) -> Stages:
    """All ranks call it together. Without a pipeline nobody holds anything else."""
    if not engine.others.pipeline:
        return Stages(tuple(range(meeting.size)))

    def mine() -> tuple[tuple[int, ...], set[str], set[str], set[str], list[set[str]]]:
        names = names_of(model, engine)
        every = {alias for name in names.params for alias in (name, *names.aliases.get(name, ()))}
        trained = check_optimizer(optimizer, engine)
        at = tuple(dimension.ranks.rank for dimension in engine.others.pipeline)
        return at, every, set(names.buffers), set(names.states), _groups(trained, names.of)

    answers = meeting.together(mine)
    peers = tuple(rank for rank, answer in enumerate(answers) if answer[0] == answers[meeting.rank][0])
    params, buffers, states = (frozenset().union(*(answer[kind] for answer in answers)) for kind in (1, 2, 3))
    count = max(len(answer[4]) for answer in answers)
    groups = (frozenset().union(*(answer[4][at] for answer in answers if at < len(answer[4]))) for at in range(count))
    return Stages(peers, params, buffers, states, tuple(groups))


def _groups(optimizer: ShardedOptimizer | None, names: dict[int, str]) -> list[set[str]]:
    if optimizer is None:
        return []
    return [{names[id(param)] for param in group["params"]} for group in optimizer.param_groups]
