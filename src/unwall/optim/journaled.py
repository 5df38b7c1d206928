"""An update ahead of its step that is made in place, and can be taken back.

[Note: journal]
Where the host has no room for shadows, a group can be updated in place before ``step`` all the same: the native kernel writes
down what the rounding loses (native/cpp/journal_impl.hpp), two bytes per element, and from that, the new values and the
gradient the old values come back bit by bit. ``step`` keeps the update, or takes it back and does it again with the factor it
clips with, in one pass. Until then the group's states are not what they should be, so nobody may see them: the update is known
to the group (``Pending.ahead``), and whoever asks a store for its states, or for its gradient in order to change it, takes it
back first. That holds for ``state_dict``, a checkpoint, another optimizer, a second backward and a fetch alike. Reading the
gradient (its norm) is no reason to.

What is spent in vain: a miss costs the time of the update, beside backward, and at the step about half an update more than one
that was not tried (the pass that takes it back and does it again has more arithmetic, not more traffic). So a journal pays
where a third of the steps leave their gradients as they are; see [Note: when to speculate]. In the first steps the moments are
too young for it (``FIRST_STEP``).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unwall.native.journal import AdamWArrays, JournalCount, read_journal, resolve, update_journaled
from unwall.native.pool import AdamWStep
from unwall.optim.journals import Journal
from unwall.optim.rule import Span, finish_updates
from unwall.optim.speculation import Progress, Speculation, Wanted
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.store import Pending
from unwall.tiers.host import DTYPES
from unwall.tiers.workers import shared_pool

FIRST_STEP = 5
"""The first step whose update fits into a journal. In the second one a tenth of the elements escape, in the fifth 0.5%."""


class CrowdedError(Exception):
    """Most elements are not updated, because too many do not fit into the journal: gradients far beyond those before."""


@dataclass(eq=False)
class JournaledUpdate(Speculation):
    """See [Note: journal]. ``take_back`` may be called by anyone, ``resolve`` by the thread that updates."""

    journal: Journal | None = None
    pending: Pending | None = None
    """Of the group, which knows of the update until the step decides."""
    spans: Sequence[Span] = ()
    places: Sequence[int] = ()
    """The journal's address for each span."""
    count: JournalCount = JournalCount(0, 0)  # noqa: RUF009 (a tuple)
    on_disturbed: Callable[[], None] = lambda: None
    """Called when someone wanted to see the states, or to change the gradient, before the step."""
    _ending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def settled(self) -> bool:
        return self.progress is Progress.RESOLVED or (self.wanted is Wanted.NO and self.progress is Progress.QUEUED)

    def stop(self) -> None:
        if self.commit is not None:
            self.commit.wait()
        else:
            self.give_up()

    def take_back(self) -> None:
        """Someone asks for the group's states, or changes its gradient: they are as before the update."""
        if self.progress in (Progress.RUNNING, Progress.FINISHED):
            self.on_disturbed()
        self.give_up()

    def give_up(self) -> None:
        """The old values again. Waits for what is under way."""
        self.want(Wanted.NO)
        if self.progress is Progress.RUNNING:
            self._ended.wait()
        self._end(None)

    def resolve(self, scale: float) -> bool:
        """At the step: the update is kept, or done again with gradients times ``scale``. False: nothing was done, and the old
        values are there."""
        return self._end(scale)

    def _end(self, scale: float | None) -> bool:
        with self._ending:
            there, failed = self.progress is Progress.FINISHED, self.progress is Progress.FAILED
            if there or failed:
                self._resolve_spans(scale if there else None)
            if scale is not None or there or failed:
                self.progress = Progress.RESOLVED
            return there and scale is not None

    def _resolve_spans(self, scale: float | None) -> None:
        tickets = []
        for span, place in zip(self.spans, self.places, strict=False):  # no places: it failed before it began
            used = _numbers(span)
            again = None if scale is None else used.scaled(scale)
            keep = (span, self.journal)
            tickets.append(resolve(shared_pool(), _arrays(span), used, again, place, keep=keep))
        for ticket in tickets:
            ticket.wait()


def journaled_work(engine: Engine, group: Group, update: JournaledUpdate, on_crowded: Callable[[], None]) -> Callable[[], None]:
    """The work of such an update, for the thread that updates. ``on_crowded``: most of it did not fit."""
    landing, stores = engine.gradients[group.index].landing, list(update.stores.values())
    reading = group.reading  # for a use that is yet to come: the one that gave the gradient has ended when this has landed

    def compute() -> None:
        if landing is not None:
            landing.wait()
        if reading is not None:
            reading.wait()
        for store in stores:
            store.await_reader()
        assert update.journal is not None
        update.places = update.journal.places(update.runs)
        tickets = [
            update_journaled(shared_pool(), _arrays(span), _numbers(span), place, keep=(span, update.journal))
            for span, place in zip(update.spans, update.places, strict=True)
        ]
        finish_updates(engine.tiers.updates, f"{group.name}, ahead", update.spans, tickets)
        counts = [read_journal(place, span.numel) for span, place in zip(update.spans, update.places, strict=True)]
        update.count = JournalCount(sum(one.escaped for one in counts), sum(one.owing for one in counts))
        engine.speculation.escaped += update.count.escaped
        if 2 * update.count.owing > sum(span.numel for span in update.spans):
            on_crowded()
            raise CrowdedError(f"{update.count.owing} elements of group {group.name} wait for the step")

    return compute


def _numbers(span: Span) -> AdamWStep:
    assert isinstance(span.numbers, AdamWStep)
    return span.numbers


def _arrays(span: Span) -> AdamWArrays:
    main = span.param if span.master is None else span.master
    return AdamWArrays(
        param=main.data_ptr(),
        exp_avg=span.states["exp_avg"].data_ptr(),
        exp_avg_sq=span.states["exp_avg_sq"].data_ptr(),
        grad=span.grad.data_ptr(),
        n=main.numel(),
        grad_dtype=DTYPES[span.grad.dtype],
        remainder=None if span.remainder is None else span.remainder.data_ptr(),
        copy=None if span.master is None else span.param.data_ptr(),
        copy_dtype=DTYPES[span.param.dtype],
    )
