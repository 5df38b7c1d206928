"""The mean loss over data that is not trained on."""

import math
import time
from typing import Any

import torch

from unwall.shards.collectives import Ranks
from unwall.train.batches import Packer, my_lanes
from unwall.train.data import Data, name_broken
from unwall.train.model import Trained
from unwall.train.packing import to_tensors


class Evaluation:
    """All samples once, in their order, packed into as many lanes as in training: the number of ranks changes nothing."""

    def __init__(self, data: Data, length: int, pad: int, lanes: int, passes: int, ranks: Ranks, alone: bool) -> None:
        self._alone = alone
        self._data, self._length, self._pad, self._ranks = data, length, pad, ranks
        self._lanes, self._passes = lanes, passes
        self._named = False
        """Whether samples that are skipped were named: once is enough."""

    def run(self, trained: Trained, step: int) -> dict[str, Any]:
        """A line of the log. All ranks call it together."""
        started = time.perf_counter()
        device = trained.engine.device.device
        order = self._data.order(0, shuffle=False)
        lanes = my_lanes(self._lanes, self._ranks.rank, self._ranks.size, None, self._data.size, self._alone)
        packer = Packer(self._data, order, lanes, self._length, self._pad)
        total, count = 0.0, 0
        broken: dict[int, str] = {}
        trained.model.eval()
        try:
            with torch.no_grad():
                while True:
                    batch = packer.step()
                    broken |= batch.broken
                    if not any(self._ranks.every(batch.tokens)):
                        break
                    each = len(batch.sequences) // self._passes
                    for start in range(0, len(batch.sequences), each):
                        sequences = batch.sequences[start : start + each]
                        mine = sum(sequence.answer_tokens for sequence in sequences)
                        loss = trained.loss(to_tensors(sequences, device), max(1, mine))
                        total += float(loss) * mine if mine else 0.0
                        count += mine
        finally:
            trained.model.train()
        if not self._named:
            self._named = True
            name_broken(broken)
        told = self._ranks.every((total, count))
        tokens = sum(each for _, each in told)
        mean = sum(each for each, _ in told) / tokens if tokens else float("nan")
        seconds = time.perf_counter() - started
        perplexity = math.exp(mean) if mean < 700 else float("inf")
        return {"kind": "eval", "step": step, "loss": mean, "perplexity": perplexity, "tokens": tokens, "seconds": seconds}
