"""Which collective is next: the ranks agree, or follow what they agreed on before.

[Note: agreement]
Ranks must call collectives in one order, but control flow may differ between them (experts, early exit, a module that only one
rank uses). They meet at the end of each forward and of each backward: an exchange of a few words over a CPU group
(shards/control.py). Between two meetings they do one of two things.

Negotiate. Before each collective every rank announces what it wants next, or that it waits at the next meeting. When all want
the same, it runs. Otherwise the ranks serve one wish after the other, lowest rank first: everybody takes part in the collective
of the served wish, whether it wanted it or not, and announces again. A rank at a meeting serves until all are there. Every rank
sees every collective, so all of them record the same sequence.

Follow a script (schedule/script.py). At a meeting each rank also says which sequence it expects until the next one, as a hash.
If all expect the same, every rank owes the others exactly these collectives in this order before it exchanges words again, and
no words are needed for any of them. A rank that needs one that is not the next serves those before it; one that needs
something else serves all that are left and then negotiates, with ranks that wait at the meeting. A rank that needs less serves
what is left when it gets there. Serving a reduction adds zeros: the rank's own gradient is negotiated later.

So no order of uses is an error, and none can hang or mix up two groups' bytes: every rank ends what was agreed on before it
blocks in an exchange. Nor does a rank leave a forward or a backward while another one still needs it there, so whatever the
user's loop does between them (a reduction of its own) meets ranks that are there, too.

A step needs no meeting of its own when the backward before it left nothing behind on any rank; a rank that does not call it is
found at the next one, because every announcement carries how many forwards, backwards and steps there were. The sum over ranks
that a norm needs is a collective as the others are, so that it cannot meet another one.

Which parameters have a gradient on some rank is announced with a wish. By script it is taken from the recording, and where a
rank contributed something else, the ranks exchange the truth at the meeting.

Where several models share the same ranks there are no scripts: their collectives would be two sequences without an order.
A rank alone needs none of it.
"""

import zlib
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_

import torch

from unwall.schedule.announcement import DEVIATED, END_BACKWARD, END_FORWARD, KEPT_SHIFT, PENDING, STEP, WHOLE, Row
from unwall.schedule.announcement import fingerprint as fingerprint_of_words
from unwall.schedule.backend import Acts
from unwall.schedule.script import GATHER, NEAR, REDUCE, SUM, Book, Follow, Op, Reduced, Script, Segment, Turn, fingerprint
from unwall.schedule.standing import Promise, Said, Standing
from unwall.shards.collectives import Ranks
from unwall.shards.control import PeerError, pack_bits, unpack_bits
from unwall.shards.feign import Feigned

MOST_SINCE_STEP = 128
"""Forwards and backwards since the step that are told apart; those beyond are taken to be alike."""


class Agreement:
    """One rank's side of it. See [Note: agreement]."""

    def __init__(
        self, ranks: Ranks, names: Sequence[str], acts: Acts, device: torch.device, feigned: Feigned, crossed: bool = False
    ) -> None:
        """``crossed``: the model itself waits for ranks of other dimensions in its passes (tensor, pipeline)."""
        self._ranks = ranks
        self._crossed = crossed
        self._control = ranks.control
        self._names = names
        self._acts = acts
        self._none = torch.zeros(2, dtype=torch.float64, device=device)
        self._values = self._total = self._none
        self._book = Book()
        self._segment = Segment(None)
        self._standing = Standing(ranks, names, feigned, self._take_promises, self._regroup)
        self._last: tuple[int, ...] = ()  # meeting, and what it was about
        self._since_step = 0  # forwards with gradients, and backwards
        self._settled = True  # no rank has gradients that were not reduced
        self._performing: tuple[Op, int] | None = None  # and how many collectives of data had begun before

    # -- collectives --------------------------------------------------------------------------------------------------

    def gather(self, index: int, near: bool = False) -> None:
        """This rank needs a group's parameters. ``near``: those of its node are enough; so below."""
        if self._ranks.size == 1:
            self._acts.join_gather(index)
        else:
            self._take(self._gathering(index, near))

    def _gathering(self, index: int, near: bool) -> Op:
        """A script is followed that has the gather over all ranks next, although one inside the node would do: this once a step
        was skipped, and the parameters are still those of before."""
        whole = Op(GATHER, index)
        follow = self._following() if near else None
        return Op(NEAR, index) if near and (follow is None or not follow.is_next(whole)) else whole

    def may_gather_ahead(self, index: int, near: bool = False) -> bool:
        """Whether a gather that is not needed yet may begin now. By script: only in its turn.

        Without a script it is negotiated, and whoever asks waits for the others. What is not needed yet is asked for by one
        rank sooner than by another (whose update still runs): with ranks of two dimensions they could wait in a circle."""
        follow = self._following()
        return not (self._crossed and self._ranks.size > 1) if follow is None else follow.is_next(self._gathering(index, near))

    def reduce(self, index: int, bits: tuple[int, ...]) -> None:
        """This rank's gradients of a group are complete; ``bits``: of which parameters."""
        self._take(Op(REDUCE, index), bits + (0,) * (self._control.bit_words - len(bits)))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of two float64 numbers over the ranks."""
        if self._ranks.size == 1:
            return values
        self._values = values
        self._take(Op(SUM, 0))
        return self._total

    # -- meetings -----------------------------------------------------------------------------------------------------

    def begin_pass(self, grad: bool) -> None:
        self._standing.anew()
        self._standing.forwards += 1
        self._since_step = min(self._since_step + grad, MOST_SINCE_STEP)

    def end_forward(self, grad: bool, sync: bool, steady: bool) -> None:
        """``steady``: the pass so far went as predicted. See ``Book``."""
        if self._ranks.size == 1:
            return
        self._meet(END_FORWARD, (grad, sync), steady)
        self._settled = self._settled and not grad

    def end_backward(self, sync: bool, steady: bool, pending: bool) -> None:
        """``pending``: this rank keeps gradients that were not reduced."""
        if self._ranks.size == 1:
            return
        kept = self._pending_words() if pending else ()
        rows = self._meet(
            END_BACKWARD, (sync,), steady, PENDING | zlib.crc32(repr(kept).encode()) << KEPT_SHIFT if pending else 0
        )
        self._standing.backwards += 1
        self._since_step = min(self._since_step + 1, MOST_SINCE_STEP)
        self._settled = not any(row.flags & PENDING for row in rows)
        if len({row.flags >> KEPT_SHIFT for row in rows}) > 1:
            self._tell_pending(kept or self._pending_words())

    def end_step(self, steady: bool, meet: bool = False) -> None:
        """Before the update: everything was reduced, on all ranks. ``meet``: and all of them say that they are ready for it."""
        if self._ranks.size == 1:
            return
        self._standing.anew()
        if meet or not self._settled:
            self._meet(STEP, (), steady)
            self._settled = True
        self._standing.steps += 1
        self._since_step = 0

    def together(self, what: str) -> None:
        """Something that all ranks must call at once. DivergedError, instead of a hang, when one of them does not."""
        if self._ranks.size > 1:
            self._standing.anew(what)
            self._meet(WHOLE, (), steady=False)

    @property
    def settled(self) -> bool:
        """No rank keeps gradients that were not reduced. The same answer on every rank."""
        return self._settled

    @property
    def failed(self) -> bool:
        """Whether the others were told that this rank cannot go on with what it was at."""
        return self._standing.failed

    @contextmanager
    def prepared(self, what: str) -> Iterator[None]:
        """The same at the end of what is inside, which each rank does alone. Where that fails on one rank, it fails on all."""
        if self._ranks.size == 1:
            yield
            return
        self._standing.anew(what)
        try:
            with self._control.watch.lock:
                self._serve_rest()
            yield
        except BaseException as error:
            self._standing.fail(error, spoilt=False)
            raise
        self._meet(WHOLE, (), steady=False)

    def note(self, what: str) -> None:
        """Something that all ranks must call before they exchange words again."""
        self._standing.noted.append(what)

    def say(self, values: "array[float]", names: Callable[[], list[str]], advice: str) -> None:
        """Numbers that must be the same on all ranks. Where they differ all ranks raise when they exchange words again, and say
        which; ``advice``: what the user should do."""
        self._standing.said.append(Said(values, names, advice))

    # -- faults: see [Note: faults] in schedule/standing.py -----------------------------------------------------------

    def fail(self, error: BaseException | str, spoilt: bool | None = None) -> None:
        """This rank cannot go on with its pass. ``spoilt``: nor can the gradients since the last step be used (None: not after
        a fault in a backward)."""
        self._standing.fail(error, in_backward() if spoilt is None else spoilt)

    def fail_for_good(self, error: BaseException, why: str) -> bool:
        """This rank failed where the others may have updated the model. False where they do know of its fault."""
        return self._standing.fail_for_good(error, why)

    def fail_alone(self, error: BaseException, why: str = "") -> bool:
        """The same for an error around a step, of which nobody is told where all ranks have met it. Without ``why`` they can go
        on, unless others have taken the step already. False where they can."""
        return self._standing.fail_alone(error, why)

    def fail_aside(self, text: str, spoilt: bool, certain: Callable[[], bool]) -> None:
        """For the thread that watches: this rank's pass has ended unseen, if that is still ``certain`` under the lock."""
        lock = self._control.watch.lock
        if lock.acquire(blocking=False):
            try:
                if certain():
                    self._standing.fail_aside(text, spoilt)
            finally:
                lock.release()

    def rejoin(self) -> None:
        """After a fault of this rank: returns when all ranks know of it."""
        self._standing.rejoin()

    def _fail_here(self, error: BaseException) -> None:
        """DivergedError where another rank's fault was heard of, and the ranks cannot go on after it."""
        self.fail(error)
        if isinstance(error, PeerError):
            self._standing.check()

    def _take_promises(self) -> Iterator[Promise]:
        if self._performing is not None:
            op, before = self._performing
            self._performing = None
            yield Promise(op, self._ranks.started - before)
        follow = self._following()
        for turn in follow.go_to_end() if follow is not None else ():
            yield Promise(turn.op)

    def _regroup(self, spoilt: bool) -> None:
        """All ranks have met after a fault."""
        self._performing = None
        self._segment, self._last = Segment(None), ()
        if spoilt:
            self._since_step, self._settled = 0, True
        self._acts.abandon(spoilt)

    # -- by script ----------------------------------------------------------------------------------------------------

    def _following(self) -> Follow | None:
        segment = self._segment
        if segment.follow is not None and segment.models != self._control.models_begun:
            self._segment = Segment(None)  # another model was sharded: all ranks did that here
        return self._segment.follow

    def _take(self, op: Op, own: tuple[int, ...] = ()) -> None:
        try:
            with self._control.watch.lock:
                self._standing.ready()
                self._go_to(op, own)
        except BaseException as error:
            self._fail_here(error)
            raise

    def _go_to(self, op: Op, own: tuple[int, ...]) -> None:
        follow = self._following()
        turns = None if follow is None else follow.go_to(op)
        if turns is None:
            self._serve_rest()
            self._negotiate(op, own)
            return
        for turn in turns:
            self._perform_turn(turn, wanted=turn.op == op, own=own)

    def _serve_rest(self) -> None:
        follow = self._following()
        for turn in follow.go_to_end() if follow is not None else ():
            self._perform_turn(turn, wanted=False)

    def _perform_turn(self, turn: Turn, wanted: bool, own: tuple[int, ...] = ()) -> None:
        segment = self._segment
        if turn.op.kind == REDUCE:
            own = own if wanted else (0,) * len(turn.present)
            segment.deviated |= own != turn.own
            self._know(turn.op.group, set())
            segment.reduced.append(Reduced(turn.op.group, unpack_bits(turn.present), own))
        elif turn.wanted and not wanted:
            segment.deviated = True
        self._perform(turn.op, unpack_bits(turn.present), wanted)

    def _pending_words(self) -> tuple[int, ...]:
        """Which parameters have a gradient here that was not reduced, as bits, group after group."""
        count = 62 * self._control.bit_words
        return tuple(word for at in range(len(self._names)) for word in pack_bits(sorted(self._acts.pending_in(at)), count))

    def _tell_pending(self, mine: Sequence[int]) -> None:
        """What is kept on one rank only shows on all of them: whoever goes through ``.grad`` does the same on every rank."""
        try:
            with self._control.watch.lock:
                rows = self._control.exchange("present", mine, "the gradients there are")
        except BaseException as error:
            self._fail_here(error)
            raise
        anywhere, width = [reduce(or_, words) for words in zip(*rows, strict=True)], self._control.bit_words
        for at in range(len(self._names)):
            self._acts.know_pending(at, unpack_bits(anywhere[at * width : (at + 1) * width]))

    def _know(self, group: int, present: set[int]) -> None:
        known = self._segment.known.setdefault(group, set(self._acts.present_in(group)))
        known |= present

    def _correct_present(self) -> None:
        """Some rank contributed other gradients than recorded. All of them say what they did contribute."""
        reduced = self._segment.reduced
        rows = self._control.exchange("present", [word for entry in reduced for word in entry.own], "the gradients there are")
        width = self._control.bit_words
        for group in sorted({entry.group for entry in reduced}):
            mine = [at for at, entry in enumerate(reduced) if entry.group == group]
            assumed = set[int]().union(*(reduced[at].assumed for at in mine))
            actual = set[int]().union(*(unpack_bits(row[at * width : (at + 1) * width]) for row in rows for at in mine))
            self._acts.correct_present(group, assumed - actual - self._segment.known[group], actual - assumed)

    # -- negotiation --------------------------------------------------------------------------------------------------

    def _negotiate(self, op: Op, own: tuple[int, ...]) -> None:
        while True:
            rows = self._standing.announce(op.kind, op.group)
            served = next(row.op for row in rows if row.op is not None)
            self._serve(served, op, own)
            if served == op:
                return

    def _meet(self, point: int, about: tuple[bool, ...], steady: bool, flags: int = 0) -> list[Row]:
        try:
            with self._control.watch.lock:
                self._standing.ready()
                return self._meet_at(point, about, steady, flags)
        except BaseException as error:
            self._fail_here(error)
            raise

    def _meet_at(self, point: int, about: tuple[bool, ...], steady: bool, flags: int) -> list[Row]:
        self._serve_rest()
        before, self._last = self._last, (point, *about)
        situation = None if point == WHOLE else (before, self._last, self._since_step)
        expected = None if situation is None or not self._control.only_model else self._book.expected(situation)
        script = 0 if expected is None else fingerprint(expected)
        flags |= DEVIATED if self._segment.deviated else 0
        what = fingerprint_of_words([self._standing.called]) if point == WHOLE else 0
        while True:
            rows = self._standing.announce(point, what, script=script, flags=flags)
            served = next((row.op for row in rows if row.op is not None), None)
            if served is None:
                break
            self._serve(served)
        if any((row.kind, row.group) != (point, rows[0].group) for row in rows):
            raise self._standing.diverged(rows)
        self._standing.met()
        deviated = any(row.flags & DEVIATED for row in rows)
        held = self._close(deviated, steady, learn=point != WHOLE)
        agreed = held and script != 0 and all(row.script == script for row in rows)
        self._begin(situation, expected if agreed else None)
        return rows

    def _close(self, deviated: bool, steady: bool, learn: bool) -> bool:
        """What this segment teaches. False when its script failed: what was expected of the next one is not to be trusted."""
        segment = self._segment
        followed = segment.follow is not None
        failed = followed and (deviated or bool(segment.negotiated))
        if followed and deviated and segment.reduced:
            self._correct_present()
        if learn and segment.situation is not None:
            if failed:
                self._book.failed(segment.situation)
            elif followed:
                self._book.held(segment.situation)
            else:
                self._book.learn(segment.situation, tuple(segment.negotiated), steady)
        return not failed

    def _begin(self, situation: Hashable, script: Script | None) -> None:
        follow = None if script is None else Follow(script)
        self._segment = Segment(situation, follow, self._control.models_begun)

    def _serve(self, op: Op, mine: Op | None = None, own: tuple[int, ...] = ()) -> None:
        """All ranks take part in the collective that one of them wants."""
        wanted = op == mine
        present: tuple[int, ...] = ()
        if op.kind == REDUCE:
            own = own if wanted else (0,) * self._control.bit_words
            every = self._control.exchange("gradients", own, f"the gradients of {self._names[op.group]}")
            present = tuple(reduce(or_, words) for words in zip(*every, strict=True))
            self._know(op.group, unpack_bits(present))
        self._segment.negotiated.append(Turn(op, present, wanted, own if wanted else (0,) * len(present)))
        self._perform(op, unpack_bits(present), wanted)

    def _perform(self, op: Op, present: set[int], wanted: bool) -> None:
        self._performing = op, self._ranks.started
        self._standing.at = op
        if op.kind in (GATHER, NEAR):
            self._acts.join_gather(op.group, near=op.kind == NEAR)
        elif op.kind == REDUCE:
            self._acts.join_reduce(op.group, present, wanted)
        else:
            self._total = self._ranks.all_reduce_sum(self._values if wanted else self._none)
        self._performing = None


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
