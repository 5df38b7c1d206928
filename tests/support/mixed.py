"""Mixed-precision training in plain PyTorch: an fp32 master beside a model in half precision."""

import copy
import functools
from collections.abc import Callable, Mapping

import torch
from reference import Case, MakeOptimizer, Run, adamw, draw, seeded
from torch import Tensor, nn

Keep = Callable[[str, nn.Parameter], bool]


def nearest(master: Tensor, dtype: torch.dtype) -> Tensor:
    """What the model computes with. bf16 is rounded as docs/design.md says (ties away from zero), since it is half of the master."""
    if dtype != torch.bfloat16 or master.dtype != torch.float32:
        return master.to(dtype)
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def compute_dtypes(model: nn.Module, dtype: torch.dtype, keep_fp32: Keep | None) -> dict[str, torch.dtype]:
    """What is fp32 is computed in ``dtype``, but for what is kept. What the user brings in another dtype stays in it."""
    return {
        name: dtype if p.dtype == torch.float32 and not (keep_fp32 and keep_fp32(name, p)) else p.dtype
        for name, p in model.named_parameters()
    }


def train_mixed(
    case: Case,
    *,
    dtype: torch.dtype,
    world: int = 1,
    steps: int = 5,
    optimizer: MakeOptimizer = adamw,
    reduce_dtype: torch.dtype | None = None,
    keep_fp32: Keep | None = None,
    scales: list[float] | None = None,
    max_grad_norm: float | None = None,
    follow: list[Mapping[str, Tensor]] | None = None,
) -> Run:
    """Forward and backward in ``dtype``; gradients summed over the ranks in ``reduce_dtype``; AdamW on the fp32 master.

    ``scales``: the loss scale of each step. A step whose gradients are not finite is left out, as with dynamic scaling.
    ``follow``: the master that each step starts from. The last bit of a master can decide how it is rounded to bf16, and that
    changes gradients a lot. A reference that follows the run it judges says of each step alone whether it was right.
    """
    model = seeded(case.build)
    dtypes = compute_dtypes(model, dtype, keep_fp32)
    master = copy.deepcopy(model)
    for parameter in master.parameters():
        parameter.data = parameter.data.to(torch.float64 if parameter.dtype == torch.float64 else torch.float32)
    replicas = [copy.deepcopy(master) for _ in range(world)]
    one = optimizer(master)
    run = Run(losses=[], state={}, states=[copy.deepcopy(master.state_dict())])
    for step in range(steps):
        if follow is not None:
            master.load_state_dict(follow[step])
        scale = scales[step] if scales else 1.0
        losses = []
        for rank, replica in enumerate(replicas):
            for (name, parameter), whole in zip(replica.named_parameters(), master.parameters(), strict=True):
                parameter.data, parameter.grad = nearest(whole.detach(), dtypes[name]), None
            loss = case.loss(replica, draw(case, step, rank, world))
            (loss * scale).backward()
            losses.append(float(loss.detach()))
        run.losses.append(losses)
        for name, parameter in master.named_parameters():
            parts = [replica.get_parameter(name).grad.to(reduce_dtype or dtypes[name]) for replica in replicas]
            parameter.grad = (functools.reduce(torch.add, parts) / world).to(parameter.dtype) / scale
        if all(parameter.grad.isfinite().all() for parameter in master.parameters()):
            if max_grad_norm is not None:
                run.norms.append(float(nn.utils.clip_grad_norm_(master.parameters(), max_grad_norm)))
            one.step()
        run.states.append(copy.deepcopy(master.state_dict()))
    run.state = run.states[-1]
    return run
