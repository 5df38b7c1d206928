"""What the groups of a model take that is sharded already."""

from collections.abc import Iterable
from dataclasses import replace

from unwall.plans import Plan
from unwall.runtime.engine import Engine
from unwall.shards.build import group_sizes
from unwall.shards.group import Group
from unwall.shards.home import Sizes
from unwall.shards.states import AVERAGE, GROUP, StateSpec, adamw_specs, bytes_per_element, master_specs


def sizes_now(
    engine: Engine,
    group: Group,
    plan: Plan,
    specs: Iterable[StateSpec] | None = None,
    owner: int = GROUP,
    average_bytes: int = 0,
) -> Sizes:
    """What a group takes with the states that it has or, where no optimizer has any yet, AdamW's.

    ``specs``: what an optimizer, the ``owner``, is about to keep. ``average_bytes``: of each element, for an average that is to
    come."""
    kept = {key: store.nbytes // max(1, group.own_numel) for key, store in group.states.items()}
    averages = sum(nbytes for key, nbytes in kept.items() if key.name == AVERAGE and key.owner != owner)
    others = [nbytes for key, nbytes in kept.items() if key.name != AVERAGE and key.owner not in (GROUP, owner)]
    trainable = specs is not None or any(param.requires_grad for param in group.params)
    held, master = sum(others), 0
    if trainable or any(key.owner == GROUP for key in kept):
        master = bytes_per_element(master_specs(group.layout.dtype, group.lean))
    if specs is not None:
        held += bytes_per_element(specs)
    elif trainable and not others:
        held += bytes_per_element(adamw_specs(group.layout.dtype, group.lean))
    ranks, replicas = engine.ranks.size, engine.others.replica_count
    found = group_sizes(group.layout, held + master, trainable, plan, ranks, group.several, master, replicas)
    average = (averages + average_bytes) * group.own_numel
    return replace(found, at_once_bytes=group.at_once_bytes, average_bytes=average)
