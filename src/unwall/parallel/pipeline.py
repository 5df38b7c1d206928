"""``unwall.pipeline``: a model over pipeline ranks, each of which shards its part over its data-parallel ranks.

[Note: a schedule's step]
torch runs the stages: it sends activations, calls forward and backward of each microbatch in the order of the schedule. Three
things are done to make that right and fast here. Gradients are scaled on their way into backward, not in ``.grad``, which is
empty until backward has ended. They stay on this rank until the last backward of the step, where memory allows; then they are
reduced once. And the whole step is one pass to the trace: the order of uses in one microbatch says nothing about what follows,
that of a step repeats. Zero-bubble schedules compute the gradients of weights apart, with ``autograd.grad``, and put them into
``.grad``: they are taken from there after each of these, and reduced at ``optimizer.step`` where one of them is the last. What
a stage must know of the batch is in parallel/batches.py.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from unwall.parallel.batches import Batches
from unwall.parallel.mesh import check_mesh, describe, names_of, roles_of
from unwall.parallel.split import counts_of, cut_of, keep_only, refuse_tied, stage_of
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of as is_sharded
from unwall.runtime.hooks import follow_wrapper
from unwall.runtime.near import become_plain

ONE_STAGE = ("gpipe", "1f1b")
LOOPED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
V_SHAPED = ("zbvzerobubble", "dualpipev")


def stages_of(schedule: str, rank: int, ranks: int) -> tuple[list[int], int]:
    """Which stages a pipeline rank runs under a schedule, and how many there are. ValueError for an unknown schedule."""
    name = schedule.lower() if isinstance(schedule, str) else ""
    if name in ONE_STAGE:
        return [rank], ranks
    if name in LOOPED:
        return [rank, rank + ranks], 2 * ranks
    if name in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank], 2 * ranks
    raise ValueError(
        f"schedule={schedule!r}: expected GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or "
        "DualPipeV"
    )


class Scaled(torch.autograd.Function):
    """The loss as it is, and its gradient divided by the number of microbatches."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, parts: int) -> torch.Tensor:
        ctx.parts = parts
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad / ctx.parts, None


class Steps:
    """Counts the backwards of a schedule's step: only the last one reduces. See [Note: a schedule's step]."""

    def __init__(self, engine: Engine, backwards: int) -> None:
        self.engine = engine
        self._backwards = backwards
        self._left = 0

    def begin(self) -> None:
        self._left = self._backwards

    def is_last(self) -> bool:
        """One more backward that brings gradients of weights."""
        self._left -= 1
        return self._left <= 0


class Stage(PipelineStage):
    """torch's stage, over a sharded module. See [Note: a schedule's step]."""

    steps: Steps

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Done in backward already."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """torch asks two stages of one rank to hand on gradients in ``schedule.eval``, too, where there are none."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        engine = self.steps.engine
        last = backward_type != "input" and self.steps.is_last()
        sync = last and backward_type == "full"  # gradients of weights alone are not there yet when their backward ends
        apart = backward_type != "full"
        with nullcontext() if sync else engine.without_sync(), _plain(engine, self.submod) if apart else nullcontext():
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight":
                engine.backward.arrivals.take_left(self.submod.parameters())
        return result


@contextmanager
def _plain(engine: Engine, module: nn.Module) -> Iterator[None]:
    """Inside, parameters are plain, whatever they show: torch looks for their autograd nodes."""
    params = [param for param in module.parameters() if id(param) in engine.places]
    for param in params:
        become_plain(param)
    try:
        yield
    finally:
        for param in params:
            for index, slot in engine.places[id(param)]:
                faces = engine.groups[index].faces
                if not faces.is_open:
                    faces.hide(slot)


def pipeline(
    model: nn.Module,
    shard: Callable[[nn.Module], nn.Module],
    engine_of: Callable[[nn.Module], Engine],
    mesh: DeviceMesh,
    microbatches: int,
    loss: Callable[..., torch.Tensor] | None,
    schedule: str,
    split: Sequence[int] | None,
) -> tuple[nn.Module, Any]:
    """See ``unwall.pipeline``. ``shard`` shards what is left of the model on this rank."""
    along = _along(mesh)
    rank, ranks = along.get_local_rank(), along.size()
    mine, stages = stages_of(schedule, rank, ranks)
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches is how many parts a batch is cut into, 1 or more, got {microbatches!r}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is a function of a microbatch's output and target, or None, got {type(loss).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"unwall.pipeline takes an nn.Module, got {type(model).__name__}")
    if any(is_sharded(module) for module in model.modules()):
        raise RuntimeError(
            "the model is already sharded: unwall.pipeline shards each rank's part itself, give it a plain model"
        )
    check_mesh(mesh, model)
    cut = cut_of(model)
    counts = counts_of(model, cut, stages, split)
    refuse_tied(model, cut, counts)
    modules = [stage_of(model, cut, counts, number) for number in mine]
    kind, group, single = get_schedule_class(schedule), along.get_group(), schedule.lower() in ONE_STAGE

    def stages_on(device: torch.device) -> Any:
        made = [Stage(module, number, stages, device, group=group) for number, module in zip(mine, modules, strict=True)]
        return made[0] if single else made

    kind(stages_on(torch.device("meta")), n_microbatches=microbatches)  # raises where it cannot run so many, or so few
    with keep_only(model, cut, counts, mine) as kept:
        part = shard(kept)
    engine = engine_of(part)
    for module in modules:
        follow_wrapper(engine, module)
    steps = Steps(engine, microbatches * len(mine))
    made = stages_on(engine.device.device)
    for stage in [made] if single else made:
        stage.steps = steps
    scaled = None if loss is None else lambda *args, **kwargs: Scaled.apply(loss(*args, **kwargs), microbatches)
    return part, _following(kind, steps, Batches(engine, microbatches))(made, n_microbatches=microbatches, loss_fn=scaled)


def _following(kind: Any, steps: Steps, batches: Batches) -> Any:
    """torch's schedule, whose step is one pass."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.begin()
        peers = steps.engine.others.peers
        with nullcontext() if peers is None else peers.named():
            batches.begin(self, args, kwargs)
            with steps.engine.one_pass():
                result = kind.step(self, *args, **kwargs)
            batches.end(self)
        return result

    return type(kind.__name__, (kind,), {"step": step, "__doc__": kind.__doc__})


def _along(mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a DeviceMesh with a dimension 'pp', got {type(mesh).__name__}")
    found = [name for name, role in roles_of(mesh).items() if role == "pipeline"]
    if len(found) != 1:
        raise ValueError(f"{describe(mesh)} has {len(found)} pipeline-parallel dimensions, expected one: call it 'pp'")
    return mesh if names_of(mesh) == (found[0],) else mesh[found[0]]
