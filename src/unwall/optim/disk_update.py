"""The update of a group that has states on disk: read, update, write, chunk by chunk, through a ring of host memory.

[Note: chunks]
While one chunk is written the next ones are read and updated; each link of the chain starts natively when the one before has
ended. A chunk whose read failed is untouched. A chunk whose write failed has its new values in its slot, and keeps the slot
until they are written: what is in memory may have been updated already, so it must not be computed twice.

When its last chunks are under way, the next group's update may begin with the slots that are free, and take theirs as they
come back ([Note: two at once] in optim/updates.py). So reads go on while the last chunks of a group are written.
"""

import errno
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from unwall.native.library import DiskError
from unwall.native.ticket import NativeTicket, Signal
from unwall.optim.rule import Span, UpdateRule, watch_updates
from unwall.optim.runs import Run
from unwall.optim.updates import Factor, Rest
from unwall.shards.states import GRAD, PARAM, StateKey
from unwall.shards.store import Store
from unwall.tiers.block import Block, DiskBlock, MemoryBlock
from unwall.tiers.disk import DiskTier, named
from unwall.tiers.host import HostBlock
from unwall.tiers.ring import BounceRing
from unwall.tiers.sizes import align_up
from unwall.tiers.ticket import Ticket
from unwall.tiers.tiers import Tiers


@dataclass(frozen=True)
class StatePart:
    """One state, where it lived when the update was asked for. An update must not ask the store, which would wait for it."""

    block: Block
    dtype: torch.dtype
    label: str

    @staticmethod
    def of(store: Store) -> "StatePart":
        return StatePart(store.block, store.dtype, store.label)


class StateParts:
    """What an update reads and writes, each where it lives: ``states`` (the parameters as ``PARAM``) and the gradient.

    ``targets``: where the new states go, if not to where the old ones are: the same tiers, other blocks.
    """

    def __init__(
        self, states: dict[StateKey, Store], grad: Store | torch.Tensor, targets: dict[StateKey, Block] | None = None
    ) -> None:
        self.states = {key: StatePart.of(store) for key, store in states.items()}
        self.grad = grad if isinstance(grad, torch.Tensor) else StatePart.of(grad)
        self.targets = targets
        self.numel = states[PARAM].numel
        on_disk = {key: part for key, part in self.states.items() if isinstance(part.block, DiskBlock)}
        self.written = dict(sorted(on_disk.items(), key=lambda item: item[0] != PARAM))
        """Written to disk, the parameters first: they are fetched as soon as they are there."""
        self.read = self.written if isinstance(self.grad, torch.Tensor) else {**self.written, GRAD: self.grad}
        """Read from disk."""

    def target(self, key: StateKey) -> Block:
        return self.states[key].block if self.targets is None else self.targets[key]


@dataclass
class _Chunk:
    start: int
    numel: int
    runs: list[Run]
    slot: HostBlock | None = None
    updated: bool = False
    incomplete: bool = False
    """Not all of its requests could be submitted."""
    tickets: list[NativeTicket] = field(default_factory=list)
    """Reads and updates."""
    writes: list[NativeTicket] = field(default_factory=list)
    params: list[NativeTicket] = field(default_factory=list)
    """What its new parameters come after."""


class DiskUpdate:
    """See [Note: chunks]. ``again``: ``begin`` is called again after something failed, so what could not be written is kept."""

    def __init__(
        self,
        name: str,
        rule: UpdateRule,
        parts: StateParts,
        runs: Sequence[Run],
        tiers: Tiers,
        landing: Ticket | None,
        factor: Factor,
        again: bool = True,
    ) -> None:
        assert tiers.disk is not None
        numel = parts.numel
        self._name = name
        self._rule = rule
        self._parts = parts
        self._disk: DiskTier = tiers.disk
        self._meters = tiers.links.meters
        self.meter = tiers.updates
        self._ring: BounceRing = tiers.chunks
        self._landing = landing
        self._factor = factor
        self._again = again
        self._places, self._slot_bytes = _places(parts, tiers.chunk_elements)
        self._todo: deque[_Chunk] = deque()
        for start in range(0, numel, tiers.chunk_elements):
            end = min(numel, start + tiers.chunk_elements)
            inside = [
                Run(max(run.start, start), min(run.end, end), run.key) for run in runs if run.start < end and run.end > start
            ]
            if inside:
                self._todo.append(_Chunk(start, end - start, inside))

    def begin(self, dropped: Callable[[], bool] = lambda: False) -> Rest | None:
        """Updates what is left to do. The last chunks may still be under way. ``dropped``: asked before each chunk whether
        anyone still wants it."""
        if self._landing is not None:
            self._landing.wait()
        if self._slot_bytes > self._ring.slot_bytes:  # shard saw nothing trained on disk: what was frozen is trained since
            self._ring.resize(self._slot_bytes)
        scale = self._factor.get()
        under_way: deque[_Chunk] = deque()
        failure: Exception | None = None
        while self._todo or under_way:
            try:
                while failure is None and self._has_room() and not dropped():
                    under_way.append(self._todo.popleft())
                    self._begin(under_way[-1], scale)
            except Exception as error:
                failure = error
                under_way[-1].incomplete = True
            if not self._todo and failure is None:
                return self._leave(list(under_way))
            if not under_way:
                if failure is None and not dropped():
                    raise RuntimeError(f"the update of group {self._name} has chunks left, but all slots are in use")
                break
            try:
                self._finish(under_way.popleft())
            except Exception as error:
                failure = failure or error
        self._raise(failure)
        return None

    def _has_room(self) -> bool:
        """Whether there is a chunk to begin, and a slot for it. The update before this one may have some to give back."""
        return bool(self._todo) and (self._todo[0].slot is not None or self._ring.await_slot())

    def _leave(self, chunks: list[_Chunk]) -> Rest:
        """Others may go on beside the last chunks."""
        self._ring.expect(len(chunks))
        return Rest(lambda: self._finish_all(chunks), tuple(ticket for chunk in chunks for ticket in chunk.params))

    def _finish_all(self, chunks: list[_Chunk]) -> None:
        failure: Exception | None = None
        for chunk in chunks:
            try:
                self._finish(chunk)
            except Exception as error:
                failure = failure or error
            finally:
                self._ring.decided()
        self._raise(failure)

    def _raise(self, failure: Exception | None) -> None:
        if isinstance(failure, DiskError):
            raise named(failure, f"the update of group {self._name}") from failure
        if failure is not None:
            raise failure

    def _begin(self, chunk: _Chunk, scale: float) -> None:
        if chunk.slot is None:
            chunk.slot = self._ring.acquire()
        if not chunk.updated:
            self._submit_update(chunk, scale)
        done = () if chunk.updated else tuple(chunk.tickets)
        chunk.writes, chunk.params = [], list(done)
        for key, part in self._parts.written.items():
            written = self._request("write", chunk, key, part, self._parts.target(key), done)
            chunk.writes += written
            if key == PARAM:
                chunk.params = written

    def _submit_update(self, chunk: _Chunk, scale: float) -> None:
        reads: list[NativeTicket] = []
        ready = Signal()  # the updates start only when all of them could be submitted: half of them must not run
        try:
            for key, part in self._parts.read.items():
                reads += self._request("read", chunk, key, part, part.block, ())
            spans = [self._span(chunk, run) for run in chunk.runs]
            out = None if self._parts.targets is None else [self._span(chunk, run, out=True) for run in chunk.runs]
            updates = self._rule.on_host(spans, scale, out, [*reads, ready])
            watch_updates(self.meter, self._name, spans, updates)
        except BaseException:
            ready.set(errno.ECANCELED, "the update was not submitted as a whole")
            for ticket in reads:
                _outcome(ticket)
            raise
        ready.set()
        chunk.tickets = [*reads, *updates]

    def _finish(self, chunk: _Chunk) -> None:
        failure: Exception | None = None
        for ticket in chunk.tickets:
            outcome = _outcome(ticket)
            failure = failure or outcome  # the first one names the file; what came after it failed because of it
        chunk.updated = chunk.updated or (failure is None and bool(chunk.tickets))
        for ticket in chunk.writes:
            outcome = _outcome(ticket)
            failure = failure or outcome
        incomplete, chunk.incomplete = chunk.incomplete, False
        chunk.tickets, chunk.writes, chunk.params = [], [], []
        if failure is None and not incomplete:
            self._give_back(chunk)
            return
        if chunk.updated and self._again:  # its new values are in its slot: they have to be written, not computed again
            self._todo.appendleft(chunk)
        else:
            self._give_back(chunk)
            self._todo.append(chunk)
        if failure is not None:
            raise failure

    def _give_back(self, chunk: _Chunk) -> None:
        if chunk.slot is None:
            return
        self._ring.release(chunk.slot)
        chunk.slot = None

    def _request(
        self, op: str, chunk: _Chunk, key: StateKey, part: StatePart, block: Block, after: Sequence[NativeTicket]
    ) -> list[NativeTicket]:
        assert isinstance(block, DiskBlock)
        assert chunk.slot is not None
        item = part.dtype.itemsize
        submit = self._disk.read if op == "read" else self._disk.write
        address, nbytes = chunk.slot.address + self._places[key], chunk.numel * item
        tickets = submit(block, chunk.start * item, address, nbytes, keep=chunk.slot.data, after=after)
        meter = self._meters["disk", "host"] if op == "read" else self._meters["host", "disk"]
        meter.add(nbytes)
        for ticket in tickets:
            meter.watch(ticket, part.label)
        return tickets

    def _span(self, chunk: _Chunk, run: Run, out: bool = False) -> Span:
        """What an update reads and writes. ``out``: where one out of place writes: what goes to disk goes to its slot."""
        assert chunk.slot is not None
        views = {}
        for key, part in {**self._parts.states, GRAD: self._parts.grad}.items():
            if isinstance(part, torch.Tensor):
                views[key] = part[run.start : run.end]
                continue
            block = self._parts.target(key) if out and key != GRAD else part.block
            if isinstance(block, MemoryBlock):
                views[key] = block.view(part.dtype)[run.start : run.end]
            else:
                view = chunk.slot.view(part.dtype, chunk.numel, self._places[key])
                views[key] = view[run.start - chunk.start : run.end - chunk.start]
        return Span.of(views, run.key)


def _places(parts: StateParts, elements: int) -> tuple[dict[StateKey, int], int]:
    """Where in a slot each state lies, and what they take together."""
    found, offset = {}, 0
    for key, part in parts.read.items():
        found[key] = offset
        offset += align_up(elements * part.dtype.itemsize)
    return found, offset


def _outcome(ticket: NativeTicket) -> Exception | None:
    try:
        ticket.wait()
    except Exception as error:
        return error
    return None
