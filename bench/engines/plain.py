"""Plain PyTorch, everything on the device: a bf16 model, fp32 masters beside it, torch's fused AdamW, all by hand."""

import torch
import torch.distributed as dist

from bench.engines import Job, Running
from bench.workload import ADAMW, COMPUTE_DTYPE, build


def start(job: Job) -> Running:
    model = build(job.shape, job.device, job.options)
    params: list[torch.Tensor] = list(model.parameters())
    masters = [param.detach().clone() for param in params]
    model.to(COMPUTE_DTYPE)
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*job.data)
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        if dist.is_initialized() and dist.get_world_size() > 1:
            _average([master.grad for master in masters if master.grad is not None])
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, job.clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        return loss.detach()

    return Running(step=step, version=torch.__version__)


def _average(grads: list[torch.Tensor]) -> None:
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
