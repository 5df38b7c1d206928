"""Samples packed into sequences of equal length.

[Note: lanes]
Each of a step's sequences is a lane of its own: lane ``j`` of ``B`` takes the samples at the positions ``j, j + B, j + 2B ...``
of the order, one after the other, and fills one sequence per step with them. Ranks share the lanes. So a step has the same
sequences whatever the number of ranks, every sample is tokenized by one rank alone, and all there is to remember of a lane is
its next position and how far into that sample it is. Which parts of which samples a sequence holds follows from their lengths
alone (``Lane.parts``): the number of steps of an epoch is counted without tokenizing twice.

[Note: documents apart]
Position ids start at 0 with each sample. transformers sees that, and lets no token attend to another sample. The first token of
a sample is not predicted. A text that goes on in the next sequence is repeated there by one token, so that each is predicted.
A model that does not see it (apart.py) gets one sample per sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from unwall.train.errors import TrainError
from unwall.train.tokens import Document

IGNORED = -100
"""A label that does not count."""
Measure = Callable[[int], int]
"""Tokens of the sample at a position: negative where it must not be cut, 0 where there is nothing to learn."""


@dataclass(frozen=True)
class Part:
    """Tokens ``start`` to ``stop`` of the sample at a position."""

    position: int
    start: int
    stop: int


@dataclass
class Sequence:
    """One packed sequence."""

    ids: list[int]
    labels: list[int]
    positions: list[int]
    samples: list[int] = field(default_factory=list)
    """Positions of the samples in it."""
    tokens: int = 0
    """Without padding."""

    @property
    def answer_tokens(self) -> int:
        return sum(label != IGNORED for label in self.labels)

    @property
    def single(self) -> bool:
        """Whether there is one sample in it at most: what is behind it is padding, which nothing before it attends to."""
        return len(self.samples) <= 1


@dataclass
class Lane:
    """See [Note: lanes]."""

    stride: int
    """How many lanes there are."""
    position: int
    """Of the sample that comes next."""
    start: int = 0
    """Tokens of it that were used already."""
    limit: int | None = None
    """Positions from here on are not read."""
    alone: bool = False
    """A sequence holds one sample, and padding."""

    def parts(self, length: int, measure: Measure, size: int) -> list[Part]:
        """What the next sequence of ``length`` tokens holds; nothing at the end. ``size``: samples of an epoch."""
        found: list[Part] = []
        room, barren = length, 0
        while room > 1 and (self.limit is None or self.position < self.limit):
            given = measure(self.position)
            have = abs(given)
            if have < 2:
                barren += 1
                if barren > size:
                    raise TrainError("no sample of the data can be used: all are empty, or hold no answer")
                self.position, self.start = self.position + self.stride, 0
                continue
            barren = 0
            if given < 0:  # not to be cut: it waits for the next sequence, or loses its end where no sequence is long enough
                have = min(have, length)
                if have > room:
                    break
            taken = min(room, have - self.start)
            found.append(Part(self.position, self.start, self.start + taken))
            room -= taken
            if self.start + taken < have:
                self.start += taken - 1
            else:
                self.position, self.start = self.position + self.stride, 0
            if self.alone:
                break
        return found


def fill(parts: list[Part], length: int, read: Callable[[int], Document], pad: int) -> Sequence:
    """The sequence that consists of these parts. See [Note: documents apart]."""
    made = Sequence([], [], [])
    for part in parts:
        document = read(part.position)
        ids = document.ids[part.start : part.stop]
        answers = [True] * len(ids) if document.answers is None else document.answers[part.start : part.stop]
        made.ids += ids
        made.labels += [IGNORED, *(id if answer else IGNORED for id, answer in zip(ids[1:], answers[1:], strict=True))]
        made.positions += range(len(ids))
        made.samples.append(part.position)
    made.tokens = len(made.ids)
    padding = length - made.tokens
    made.ids += [pad] * padding
    made.labels += [IGNORED] * padding
    made.positions += range(padding)
    return made


def to_tensors(sequences: list[Sequence], device: torch.device) -> dict[str, torch.Tensor]:
    """What a model takes. Position ids only where samples share a sequence: without them attention is plainly causal."""
    found = {"input_ids": [each.ids for each in sequences], "labels": [each.labels for each in sequences]}
    if not all(each.single for each in sequences):
        found["position_ids"] = [each.positions for each in sequences]
    return {name: torch.tensor(rows, dtype=torch.long, device=device) for name, rows in found.items()}
