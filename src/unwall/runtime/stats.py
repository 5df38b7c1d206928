"""What a sharded model did and holds: bytes per tier, bytes per link, elements in collectives."""

import weakref
from dataclasses import dataclass, replace

from unwall.runtime.counts import ActivationStats, Speculated
from unwall.runtime.engine import Engine
from unwall.runtime.stats_table import stats_line, stats_table
from unwall.tiers.meter import LinkMeter, LinkStats


@dataclass(frozen=True)
class TierStats:
    """One tier of one rank."""

    live_bytes: int
    peak_bytes: int
    """Since the last reset."""
    budget_bytes: int | None
    """What the plan allows. None: the plan names no limit."""


@dataclass(frozen=True)
class CollectiveStats:
    """One kind of collective since the last reset."""

    elements: int
    """Elements of whole groups, padding included: Psi for every parameter once. Over replicas those of this rank's shards."""
    bytes: int = 0
    """What came from other ranks, in the form it travels in: of a whole group (N - 1) / N."""
    far_bytes: int = 0
    """Of these bytes, what came from other nodes. 0 where the plan knows of no nodes."""


@dataclass(frozen=True)
class Stats:
    """A snapshot: ``print`` it for a table. ``reset`` makes the model's counters start anew; live bytes stay what they are."""

    tiers: dict[str, TierStats]
    links: dict[str, LinkStats]
    collectives: dict[str, CollectiveStats]
    control_exchanges: int
    """Times the ranks exchanged words to agree on what comes next, since the last reset. Each one blocks."""
    trace_mismatches: int
    """Passes that used the groups in another order than the pass before."""
    steps: int
    """Optimizer steps."""
    skipped_steps: int
    """Those that changed nothing because gradients were not finite. They are not counted among the steps."""
    speculated: Speculated
    """Groups that were updated ahead of their step, and how that ended."""
    _engine: weakref.ref[Engine]
    """Who keeps a snapshot does not keep the model."""
    activations: ActivationStats | None = None
    """The last pass. None where nothing decides about activations, or the model checkpoints by itself."""

    @property
    def disk_bytes_per_step(self) -> float:
        """What a step writes to disk on average: what wears a drive out."""
        written = self.links.get("host>disk")
        return 0.0 if written is None else written.moved_bytes / max(1, self.steps)

    def __str__(self) -> str:
        return stats_table(self)

    def __repr__(self) -> str:
        return stats_line(self)

    def reset(self) -> None:
        """The counters start anew."""
        engine = self._engine()
        if engine is None:
            raise RuntimeError("reset of statistics whose model is gone: there are no counters any more")
        executor = engine.executor
        executor.gathered_elements = executor.reduced_elements = 0
        engine.ranks.traffic.reset()
        if engine.replicas is not None:
            engine.replicas.reset()
        executor.trace.mismatches = 0
        engine.ranks.control.exchanges = 0
        engine.speculation = Speculated()
        for ledger in engine.tiers.ledgers.values():
            ledger.reset_peak()
        for meter in _meters(engine):
            meter.reset()
        engine.steps = engine.skipped = 0


def _meters(engine: Engine) -> list[LinkMeter]:
    collective = [] if engine.ranks.meter is None else [engine.ranks.meter]
    return [*engine.tiers.links.meters.values(), engine.tiers.updates, *collective]


def read_stats(engine: Engine) -> Stats:
    """What ``unwall.stats`` returns."""
    engine.finish()
    executor, traffic = engine.executor, engine.ranks.traffic
    return Stats(
        tiers={
            name: TierStats(ledger.live_bytes, ledger.peak_bytes, ledger.budget_bytes)
            for name, ledger in engine.tiers.ledgers.items()
        },
        links={meter.name: meter.read() for meter in _meters(engine) if meter.read().copies},
        collectives={
            "all_gather": CollectiveStats(executor.gathered_elements, traffic.gathered_bytes, traffic.gathered_far_bytes),
            "reduce_scatter": CollectiveStats(executor.reduced_elements, traffic.reduced_bytes, traffic.reduced_far_bytes),
            **_over_replicas(engine),
        },
        control_exchanges=engine.ranks.control.exchanges,
        trace_mismatches=executor.trace.mismatches,
        steps=engine.steps,
        skipped_steps=engine.skipped,
        speculated=replace(engine.speculation),
        activations=_activations(engine),
        _engine=weakref.ref(engine),
    )


def _over_replicas(engine: Engine) -> dict[str, CollectiveStats]:
    """Averages of this rank's gradients with the other replicas of a mesh, where there are some."""
    replicas = engine.replicas
    return {} if replicas is None else {"replicas": CollectiveStats(replicas.averaged_elements, replicas.averaged_bytes)}


def _activations(engine: Engine) -> ActivationStats | None:
    decides = engine.activations
    found: ActivationStats | None = None if decides is None or decides.left_alone else decides.account()
    return found
