"""What the stages of a pipeline must know of each other's batch.

[Note: batches of a pipeline]
Only the first stage sees the inputs of a step, and only the last one the target and the loss. Yet every stage receives into
buffers of fixed sizes, and takes the loss scale out of its own gradients. So the stages exchange one small frame before each
step: how many rows a rank was given, and a sum of all shapes. Rows that cannot be cut into equal microbatches are refused on
every rank; where the shapes are others than in the step before, torch is told to measure its buffers anew. With fp16 there is
a second one behind the step: by what the loss was scaled.
"""

import struct
import zlib
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unwall.runtime.engine import Engine

NOT_SPLIT = ("losses", "return_outputs", "loss_kwargs")
"""Arguments of a schedule's ``step`` that torch does not cut into microbatches."""
FLAGS = ("_stage_forward_initialized", "_stage_backward_initialized")
FLAGS_OF_SEVERAL = ("_stages_forward_initialized", "_stages_backward_initialized")
"""Where torch's schedules note that their buffers are there (private to torch; tests/parallel/test_pipeline.py tells)."""
SHAPES = ("inputs_meta", "_outputs_meta")
"""Where stages of older versions of torch keep what they have measured, whatever the schedule notes."""


class Batches:
    """The batches of one schedule. See [Note: batches of a pipeline]."""

    def __init__(self, engine: Engine, microbatches: int) -> None:
        self._engine = engine
        self._controls = [dimension.ranks.control for dimension in engine.others.pipeline]
        self._microbatches = microbatches
        self._shapes: list[int] | None = None

    def begin(self, schedule: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step. ValueError, on every rank, for a batch that cannot be cut into equal parts."""
        given = (args, {name: value for name, value in kwargs.items() if name not in NOT_SPLIT})
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        uneven = next((len(tensor) for tensor in tensors if len(tensor) % self._microbatches or not len(tensor)), -1)
        shapes = zlib.crc32(repr([(tuple(tensor.shape), tensor.dtype) for tensor in tensors]).encode())
        every = self._exchange("batches of a pipeline", [uneven, shapes])
        for rank, (rows, _) in enumerate(every):
            if rows >= 0:
                raise ValueError(
                    f"schedule.step got a batch of {rows} rows on pipeline rank {rank}, which cannot be cut into "
                    f"{self._microbatches} equal microbatches: give a multiple of {self._microbatches} (drop_last=True of a "
                    "loader), or fill up with rows that the loss ignores"
                )
        found = [shape for _, shape in every]
        if self._shapes not in (None, found):
            for flag in FLAGS if hasattr(schedule, FLAGS[0]) else FLAGS_OF_SEVERAL:
                setattr(schedule, flag, False)
            for stage in _stages_of(schedule):
                vars(stage).update((name, None) for name in SHAPES if name in vars(stage))
        self._shapes = found

    def end(self, schedule: Any) -> None:
        """Behind a step: every stage learns how the last one has scaled the loss. What another one knows may be older: a stage
        without gradients has had none to take it out of."""
        mine = self._engine.loss_scale
        if self._engine.plan.compute_dtype is not torch.float16:
            if mine != 1.0 and self._controls:
                raise RuntimeError(
                    f"optimizer.scale in the loss of a pipeline that computes in {self._engine.plan.compute_dtype}: the other "
                    "stages expect that with compute_dtype=torch.float16 alone. Leave it out, only fp16 needs it"
                )
            return
        last = any(stage.is_last for stage in _stages_of(schedule))
        every = self._exchange("loss scale of a pipeline", [int(last), struct.unpack("<q", struct.pack("<d", mine))[0]])
        (word,) = (word for is_last, word in every if is_last)
        (self._engine.loss_scale,) = struct.unpack("<d", struct.pack("<q", word))

    def _exchange(self, kind: str, words: list[int]) -> list[list[int]]:
        every = [words]
        for control in self._controls:
            every = control.exchange(kind, words, "schedule.step")
        return every


def _stages_of(schedule: Any) -> list[Any]:
    """This rank's."""
    return [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages
