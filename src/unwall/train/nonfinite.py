"""A loss that is not finite: which samples it came from."""

import torch

from unwall.shards.collectives import Ranks
from unwall.train.batches import Batch
from unwall.train.data import Data
from unwall.train.model import Trained
from unwall.train.order import Order
from unwall.train.packing import to_tensors

SHOWN = 8
"""Samples that are named."""


def find_samples(trained: Trained, batch: Batch, data: Data, order: Order, ranks: Ranks) -> str:
    """Computes each sequence of the step again, alone, and names the samples of those that are not finite.

    All ranks call it together; the parameters are those of the step before."""
    device = trained.engine.device.device
    found: list[str] = []
    with torch.no_grad():
        for sequence in batch.sequences:
            loss = trained.loss(to_tensors([sequence], device), max(1, sequence.answer_tokens))
            if not bool(torch.isfinite(loss)):
                found += [data.where(order.sample(position)) for position in sequence.samples]
    named = [name for told in ranks.every(found) for name in told]
    if not named:
        return "no sequence alone gives it: the gradients overflowed"
    more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return f"in the sequence of {', '.join(named[:SHOWN])}{more}"
