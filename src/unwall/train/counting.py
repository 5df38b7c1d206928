"""How many steps an epoch has: every sample is tokenized once ahead, by all ranks together, and only its length is kept.

A thread does it, while the model is built and its weights are read: the number is needed for the first step's learning rate.
"""

import hashlib
import json
import threading
import time
from pathlib import Path

import numpy as np

from unwall.shards.collectives import Ranks
from unwall.terminal import say
from unwall.train.batches import my_lanes
from unwall.train.data import Data
from unwall.train.order import Order
from unwall.train.world import together

QUIET_S = 3.0
"""Counting that takes longer is worth a word."""


class Counting:
    """Lengths of all samples, in a file of the index. Nobody else reads the data meanwhile.

    ``key``: what else the lengths depend on (the tokenizer). All ranks make it, and ask it, together.
    """

    def __init__(self, data: Data, folder: Path, ranks: Ranks, key: str) -> None:
        name = hashlib.sha256(json.dumps([data.to_dict(), key]).encode()).hexdigest()[:20]
        self._data, self._ranks = data, ranks
        self._path, self._done = folder / f"{name}.lengths", folder / f"{name}.counted"
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._ended = False
        if all(ranks.every(self._done.exists())):
            return
        together(ranks, self._make_file)
        self._thread = threading.Thread(target=self._run, name="unwall counting", daemon=True)
        self._thread.start()

    def steps(self, order: Order, lanes: int, length: int, limit: int, alone: bool = False) -> int:
        """Steps until every lane has read what stands before ``limit``."""
        self._outwait()
        lengths = np.memmap(self._path, dtype="<i4", mode="r", shape=(self._data.size,))

        def measure(position: int) -> int:
            return int(lengths[order.sample(position)])

        most = 0
        for lane in my_lanes(lanes, self._ranks.rank, self._ranks.size, None, limit, alone):
            steps = 0
            while lane.parts(length, measure, order.size):
                steps += 1
            most = max(most, steps)
        return int(max(self._ranks.every(most)))

    def close(self) -> None:
        """What is not counted yet is not wanted any more."""
        self._ended = True
        if self._thread is not None:
            self._thread.join()

    def _make_file(self) -> None:
        if self._ranks.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            np.memmap(self._path, dtype="<i4", mode="w+", shape=(self._data.size,)).flush()

    def _outwait(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        self._data.broken.clear()  # they are told when the run comes to them
        together(self._ranks, self._raise)
        if self._ranks.rank == 0:
            self._done.touch()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._count()
        except Exception as error:
            self._error = error
        except BaseException as error:  # a tokenizer's panic is one
            self._error = RuntimeError(f"{type(error).__name__} while samples were counted: {error}")

    def _count(self) -> None:
        data, rank, size = self._data, self._ranks.rank, self._ranks.size
        written = np.memmap(self._path, dtype="<i4", mode="r+", shape=(data.size,))
        told, begin = rank != 0, time.monotonic()
        for sample in range(data.size * rank // size, data.size * (rank + 1) // size):
            if self._ended:
                return
            document = data.read(sample)
            count = 0 if document is None else len(document.ids)
            written[sample] = count if document is None or document.answers is None else -count
            if not told and time.monotonic() - begin >= QUIET_S:
                told = True
                say(f"counting the tokens of {data.size:,} samples, once: it says how many steps there are")
        written.flush()
