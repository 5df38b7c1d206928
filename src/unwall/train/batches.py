"""The sequences of each step that are this rank's, made ahead of time by a thread."""

import contextlib
import queue
import threading
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from unwall.train.data import Data
from unwall.train.order import Order
from unwall.train.packing import Lane, Sequence, fill
from unwall.train.tokens import Document

AHEAD = 2
"""Steps that are prepared ahead."""
_EMPTY = Document([], None)


@dataclass(frozen=True)
class Batch:
    """One step's sequences of this rank."""

    sequences: list[Sequence]
    lanes: list[tuple[int, int]]
    """Where each lane of this rank stands behind it: position, and tokens of that sample that were used."""
    broken: dict[int, str]
    """Samples that were skipped on the way, and why."""

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.sequences)

    @property
    def answer_tokens(self) -> int:
        return sum(each.answer_tokens for each in self.sequences)


class Packer:
    """Fills the sequences of some lanes, one step after the other. See [Note: lanes] in packing.py."""

    def __init__(self, data: Data, order: Order, lanes: Listed[Lane], length: int, pad: int) -> None:
        self.lanes = list(lanes)
        self._data, self._order, self._length, self._pad = data, order, length, pad
        self._held: dict[int, Document] = {}

    def step(self) -> Batch:
        sequences = [self._sequence(lane) for lane in self.lanes]
        broken, self._data.broken = self._data.broken, {}
        return Batch(sequences, [(lane.position, lane.start) for lane in self.lanes], broken)

    def _sequence(self, lane: Lane) -> Sequence:
        parts = lane.parts(self._length, self._measure, self._order.size)
        made = fill(parts, self._length, self._document, self._pad)
        for part in parts:
            if part.position != lane.position:
                self._held.pop(part.position, None)
        return made

    def _document(self, position: int) -> Document:
        if position not in self._held:
            self._held[position] = self._data.read(self._order.sample(position)) or _EMPTY
        return self._held[position]

    def _measure(self, position: int) -> int:
        document = self._document(position)
        if len(document.ids) < 2:
            self._held.pop(position)
        return len(document.ids) if document.answers is None else -len(document.ids)


class Batches:
    """A packer in a thread. What it fails with is raised by ``next``."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=AHEAD)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unwall data", daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            made: Batch | BaseException
            try:
                made = self._packer.step()
            except BaseException as error:
                made = error
            while not self._ended.is_set():
                with contextlib.suppress(queue.Full):
                    self._ready.put(made, timeout=0.1)
                    break
            if isinstance(made, BaseException):
                return


def my_lanes(
    count: int, rank: int, ranks: int, states: Listed[tuple[int, int]] | None, limit: int | None, alone: bool = False
) -> list[Lane]:
    """This rank's share of ``count`` lanes, at their beginning or where ``states`` (of all lanes) says."""
    each = count // ranks
    found = []
    for number in range(rank * each, (rank + 1) * each):
        position, start = (number, 0) if states is None else states[number]
        found.append(Lane(count, position, start, limit, alone))
    return found
