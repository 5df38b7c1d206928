"""What an update ahead of its step computes: a group's update out of place, from its states into a shadow."""

from collections.abc import Callable

from unwall.optim.disk_update import DiskUpdate, StateParts
from unwall.optim.rule import UpdateRule, finish_updates, spans_of
from unwall.optim.speculation import Speculation, Wanted
from unwall.optim.updates import Factor, Rest
from unwall.runtime.engine import Engine
from unwall.shards.group import Group


def out_of_place(engine: Engine, group: Group, rule: UpdateRule, speculation: Speculation) -> Callable[[], Rest | None]:
    """The work of a speculation. What is under way on the group ends first, and what was looked at is on disk again; DiskError
    where that fails."""
    return (_through_disk if speculation.through_disk else _in_memory)(engine, group, rule, speculation)


def _in_memory(engine: Engine, group: Group, rule: UpdateRule, speculation: Speculation) -> Callable[[], None]:
    """The update of a group in host memory."""
    gradient, stores = engine.gradients[group.index], speculation.stores
    assert speculation.shadow is not None
    sources = spans_of({key: store.tensor(write=False) for key, store in stores.items()}, gradient.value, speculation.runs)
    targets = spans_of(speculation.shadow.tensors(stores), gradient.value, speculation.runs)
    landing = gradient.landing

    def compute() -> None:
        if landing is not None:
            landing.wait()
        finish_updates(engine.tiers.updates, f"{group.name}, ahead", sources, rule.on_host(sources, 1.0, targets))

    return compute


def _through_disk(engine: Engine, group: Group, rule: UpdateRule, speculation: Speculation) -> Callable[[], Rest | None]:
    """The same for a group with states on disk. The next one's reads begin while its last chunks are written."""
    gradient = engine.gradients[group.index]
    assert speculation.shadow is not None
    parts = StateParts(speculation.stores, gradient.source, speculation.shadow.blocks)
    name, factor = f"{group.name}, ahead", Factor(1.0, None)
    update = DiskUpdate(name, rule, parts, speculation.runs, engine.tiers, gradient.landing, factor, again=False)
    return lambda: update.begin(dropped=lambda: speculation.wanted is Wanted.NO)
