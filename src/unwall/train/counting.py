"""How many steps an epoch has: every sample is tokenized once ahead, by all ranks together, and only its length is kept."""

import hashlib
import json
import time
from pathlib import Path

import numpy as np

from unwall.shards.collectives import Ranks
from unwall.train.batches import my_lanes
from unwall.train.data import Data
from unwall.train.order import Order

QUIET_S = 3.0
"""Counting that takes longer is worth a word."""


def count_steps(data: Data, order: Order, folder: Path, ranks: Ranks, lanes: int, length: int, limit: int, key: str) -> int:
    """Steps until every lane has read what stands before ``limit``. All ranks call it together.

    ``key``: what else the lengths depend on (the tokenizer).
    """
    lengths = _lengths(data, folder, ranks, key)

    def measure(position: int) -> int:
        return int(lengths[order.sample(position)])

    most = 0
    for lane in my_lanes(lanes, ranks.rank, ranks.size, None, limit):
        steps = 0
        while lane.parts(length, measure, order.size):
            steps += 1
        most = max(most, steps)
    return int(max(ranks.every(most)))


def _lengths(data: Data, folder: Path, ranks: Ranks, key: str) -> np.ndarray:
    """Tokens of each sample, negative where it must not be cut."""
    name = hashlib.sha256(json.dumps([data.to_dict(), key]).encode()).hexdigest()[:20]
    path, done = folder / f"{name}.lengths", folder / f"{name}.counted"
    if not all(ranks.every(done.exists())):
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            np.memmap(path, dtype="<i4", mode="w+", shape=(data.size,)).flush()
        ranks.every(None)
        written = np.memmap(path, dtype="<i4", mode="r+", shape=(data.size,))
        told, begin = ranks.rank != 0, time.monotonic()
        for sample in range(data.size * ranks.rank // ranks.size, data.size * (ranks.rank + 1) // ranks.size):
            document = data.read(sample)
            count = 0 if document is None else len(document.ids)
            written[sample] = count if document is None or document.answers is None else -count
            if not told and time.monotonic() - begin >= QUIET_S:
                told = True
                print(f"counting the tokens of {data.size:,} samples, once: it says how many steps there are", flush=True)
        written.flush()
        data.broken.clear()  # they are told when the run comes to them
        ranks.every(None)
        if ranks.rank == 0:
            done.touch()
    return np.memmap(path, dtype="<i4", mode="r", shape=(data.size,))
