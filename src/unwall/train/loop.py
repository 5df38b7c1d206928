"""The training loop."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unwall.api import profile
from unwall.shards.collectives import Ranks
from unwall.train.again import with_room
from unwall.train.batches import Batch, Batches
from unwall.train.data import Data, name_broken
from unwall.train.errors import TrainError
from unwall.train.evaluation import Evaluation
from unwall.train.live import LiveLine
from unwall.train.log import Log
from unwall.train.meters import Meters
from unwall.train.model import Trained
from unwall.train.nonfinite import find_samples
from unwall.train.options import Options
from unwall.train.order import Order
from unwall.train.packing import to_tensors
from unwall.train.rate import rate_at
from unwall.train.saving import AdapterSaver, FullSaver
from unwall.train.signals import StopRequests
from unwall.train.start import Start
from unwall.train.world import ToldElsewhereError

PROFILED_STEP = 3
"""Counted from the start of the command: the first ones learn the order of use."""


@dataclass
class Progress:
    """Where a run stands: what a checkpoint holds beside the model."""

    step: int = 0
    lanes: list[tuple[int, int]] | None = None
    """Of all ranks."""
    skipped: int = 0
    """Samples."""

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "lanes": [list(lane) for lane in self.lanes or ()], "skipped": self.skipped}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "Progress":
        lanes = [(int(position), int(start)) for position, start in found["lanes"]]
        return cls(int(found["step"]), lanes or None, int(found["skipped"]))


@dataclass
class Loop:
    """Everything that a step needs. Built by ``command.py``."""

    options: Options
    ranks: Ranks
    trained: Trained
    data: Data
    order: Order
    batches: Batches
    passes: int
    steps: int
    progress: Progress
    saver: FullSaver | AdapterSaver
    line: LiveLine
    log: Log | None
    """Rank 0's."""
    evaluation: Evaluation | None
    bound_s: float | None
    trace: Path | None
    """Where the time line of one step goes; None on the other ranks."""
    stop: StopRequests
    start: Start | None = None
    """Says where the time until the first step went."""

    def run(self) -> str | None:
        """Until the last step, or until someone asks to stop: then the signal's name."""
        meters, first, saved = Meters(self.trained.engine), self.progress.step, self.progress.step
        asked = None
        while self.progress.step < self.steps:
            batch, counts, asked = self._agree()
            if self.start is not None and self.progress.step == first:
                self.start.lap("first batch")
            if asked is not None or not counts[0]:  # no tokens: a run that began with samples packed otherwise is through
                break
            step = self.progress.step + 1
            profiled = step == first + PROFILED_STEP
            recording = profile(self.trained.model) if profiled else nullcontext()
            meters.start()
            line = self._step(step, batch, counts, recording)
            reading = meters.read()
            if step == first + 1:
                self._tell_start(first)
            self._advance(step, batch)
            self._tell(line, reading, profiled, counts)
            if self.evaluation is not None and self.options.eval_every and step % self.options.eval_every == 0:
                self._evaluate()
            if self.options.save_every and step % self.options.save_every == 0:
                self.save(block=False)
                saved = step
        if saved != self.progress.step:
            self.save(block=True)
        self.saver.wait()
        if asked is None and self.evaluation is not None and self.steps % (self.options.eval_every or self.steps + 1):
            self._evaluate()
        return asked

    def save(self, *, block: bool) -> None:
        """Where the run stands now. All ranks call it together."""
        if not self.options.save_every:
            return
        self.saver.save(self.progress.to_dict(), block=block)

    def _agree(self) -> tuple[Batch, tuple[int, int], str | None]:
        """The next batch; tokens and answer tokens of all ranks; whether someone asked to stop. An error of one ends all."""
        batch: Batch | None = None
        error: Exception | None = None
        try:
            batch = self.batches.next()
        except Exception as found:
            error = found
        mine = None if batch is None else (batch.tokens, batch.answer_tokens, len(batch.broken))
        told = self.ranks.every((mine, self.stop.asked))
        failed = [rank for rank, (theirs, _) in enumerate(told) if theirs is None]
        if failed and failed[0] != self.ranks.rank:
            raise ToldElsewhereError("another rank could not read its data")
        if error is not None:
            raise error
        assert batch is not None
        asked = next((name for _, name in told if name is not None), None)
        if asked is None:
            name_broken(batch.broken)
            self.progress.skipped += sum(theirs[2] for theirs, _ in told)
        return batch, (sum(theirs[0] for theirs, _ in told), sum(theirs[1] for theirs, _ in told)), asked

    def _step(self, step: int, batch: Batch, counts: tuple[int, int], recording: AbstractContextManager[Any]) -> dict[str, Any]:
        """One step: all passes, then the update. Gives the first fields of its line in the log."""
        rate = rate_at(step, self.steps, self.options.rate, self.options.warmup, self.options.schedule)
        for group in self.trained.optimizer.param_groups:
            group["lr"] = rate
        with recording as recorded:
            loss, finite = with_room(lambda: self._passes(batch, max(1, counts[1])), self.trained, self.line.say)
            norm: float | None = None
            if finite:
                norm, finite = self._update()
            else:
                self.trained.optimizer.zero_grad()
        if recorded is not None and self.trace is not None:
            recorded.save_trace(self.trace)
        if not finite:
            self._not_finite(step, loss, batch)
        line = {"kind": "step", "step": step, "loss": loss, "lr": rate, "grad_norm": norm}
        return line if finite else line | {"skipped": True}

    def _passes(self, batch: Batch, count: int) -> tuple[float, bool]:
        """Forward and backward of each pass. The loss of the whole step, and whether every pass's is finite."""
        device, optimizer = self.trained.engine.device.device, self.trained.optimizer
        each = len(batch.sequences) // self.passes
        losses = []
        for start in range(0, len(batch.sequences), each):
            loss = self.trained.loss(to_tensors(batch.sequences[start : start + each], device), count)
            scaled = optimizer.scale(loss) if self.trained.engine.plan.compute_dtype is torch.float16 else loss
            scaled.backward()
            losses.append(loss.detach().float())
        total = float(torch.stack(losses).sum())
        told = self.ranks.every(total)
        whole = sum(told)
        return whole, math.isfinite(whole)

    def _update(self) -> tuple[float | None, bool]:
        """The step of the optimizer. The norm of the gradients, and whether they were finite."""
        optimizer, owner = self.trained.optimizer, self.trained.engine
        skipped = owner.skipped
        optimizer.step()
        optimizer.zero_grad()
        if owner.skipped != skipped:
            return None, owner.plan.compute_dtype is torch.float16  # there it is the loss scale's way of finding itself
        return (None, True) if optimizer.grad_norm is None else (float(optimizer.grad_norm), True)

    def _not_finite(self, step: int, loss: float, batch: Batch) -> None:
        named = find_samples(self.trained, batch, self.data, self.order, self.ranks)
        what = f"step {step}: the loss is {loss}" if not math.isfinite(loss) else f"step {step}: the gradients are not finite"
        if self.options.on_nonfinite == "skip":
            self.line.say(f"{what}, {named}; the step changes nothing")
            return
        self.save(block=True)
        raise_on_first(
            self.ranks,
            f"{what}, {named}; step {self.progress.step} counts. Look at those samples, lower --lr, or go on with "
            "--on-nonfinite skip",
        )

    def _advance(self, step: int, batch: Batch) -> None:
        """Where all lanes stand now."""
        self.progress.step = step
        self.progress.lanes = [lane for lanes in self.ranks.every(batch.lanes) for lane in lanes]

    def _tell(self, line: dict[str, Any], reading: Any, profiled: bool, counts: tuple[int, int]) -> None:
        line |= {
            "tokens": counts[0], "answer_tokens": counts[1], "seconds": reading.seconds,
            "tokens_per_second": counts[0] / reading.seconds,
            "bound_fraction": None if self.bound_s is None else self.bound_s / reading.seconds,
            "live_bytes": reading.live_bytes, "peak_bytes": reading.peak_bytes, "stall_seconds": reading.stall_seconds,
            "allocated_bytes": reading.allocated_bytes,
            "epoch": round(min(position for position, _ in self.progress.lanes or [(0, 0)]) / self.order.size, 6),
            "skipped_samples": self.progress.skipped,
        }  # fmt: skip
        if profiled:
            line["profiled"] = True
        if self.log is not None:
            self.log.add(line)
        self.line.show(line)

    def _tell_start(self, step: int) -> None:
        """The first step is done."""
        if self.start is None:
            return
        self.start.lap("first step")
        if self.log is not None:
            self.log.add(self.start.line(step))
        if self.options.verbose:
            self.line.say(str(self.start))

    def _evaluate(self) -> None:
        assert self.evaluation is not None
        line = self.evaluation.run(self.trained, self.progress.step)
        if self.log is not None:
            self.log.add(line)
        self.line.show(line)


def raise_on_first(ranks: Ranks, message: str) -> None:
    """The same error on all ranks; rank 0 says it."""
    if ranks.rank == 0:
        raise TrainError(message)
    raise ToldElsewhereError(message)
