"""What a sharded model did and holds: bytes a tier, bytes a link, elements in collectives."""

from dataclasses import dataclass

from unwall.runtime.engine import Engine
from unwall.tiers.meter import LinkStats


@dataclass(frozen=True)
class TierStats:
    """One tier of one rank."""

    live_bytes: int
    peak_bytes: int
    """Since the last reset."""
    budget_bytes: int | None


@dataclass(frozen=True)
class CollectiveStats:
    """One kind of collective since the last reset."""

    elements: int
    """Elements of whole groups, padding included: Psi for every parameter once."""


@dataclass(frozen=True)
class Stats:
    """A snapshot. ``reset`` makes the counters of the model start anew; live bytes stay what they are."""

    tiers: dict[str, TierStats]
    links: dict[str, LinkStats]
    collectives: dict[str, CollectiveStats]
    trace_mismatches: int
    """Passes that used the groups in another order than the pass before."""
    _engine: Engine

    def reset(self) -> None:
        executor = self._engine.executor
        executor.gathered_elements = executor.reduced_elements = 0
        executor.trace.mismatches = 0
        for ledger in self._engine.tiers.ledgers.values():
            ledger.reset_peak()
        for meter in self._engine.tiers.links.meters.values():
            meter.reset()


def read_stats(engine: Engine) -> Stats:
    """What ``unwall.stats`` returns."""
    engine.finish()
    executor = engine.executor
    return Stats(
        tiers={
            name: TierStats(ledger.live_bytes, ledger.peak_bytes, ledger.budget_bytes)
            for name, ledger in engine.tiers.ledgers.items()
        },
        links={meter.name: meter.read() for meter in engine.tiers.links.meters.values() if meter.read().copies},
        collectives={
            "all_gather": CollectiveStats(executor.gathered_elements),
            "reduce_scatter": CollectiveStats(executor.reduced_elements),
        },
        trace_mismatches=executor.trace.mismatches,
        _engine=engine,
    )
