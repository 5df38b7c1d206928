"""PyTorch's FSDP2: fp32 parameters cut over the ranks, bf16 compute; with ``offload`` they and AdamW are on the CPU."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from bench.engines import Job, Running
from bench.workload import ADAMW, COMPUTE_DTYPE, build, fill


def sharded(job: Job, offload: bool) -> nn.Module:
    """The model on FSDP2 with its first weights: one group per block, the rest in one more."""
    mesh = init_device_mesh(job.device.type, (dist.get_world_size(),))
    model = build(job.shape, "meta")
    precision = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE, reduce_dtype=torch.float32)
    policy = CPUOffloadPolicy(pin_memory=job.device.type == "cuda") if offload else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=policy)
    model.to_empty(device="cpu" if offload else job.device)
    fill(model, job.device)
    return model


def start(job: Job) -> Running:
    model = sharded(job, offload="offload" in job.options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*job.data)
        loss.backward()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Running(step=step, version=torch.__version__)
