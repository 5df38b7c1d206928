"""torchao's CPU offload optimizer: parameters on the device, AdamW on the CPU, parameter by parameter.

Under FSDP2 with one rank or more, because that is where torchao meets bf16 compute with an fp32 master. It takes gradients to
the host as soon as backward has them, so it cannot clip by the whole norm: it runs with ``clip=none`` only. They stay on the
device, too: letting go of them there (``offload_gradients``) is not possible for FSDP2's, as of torchao 0.18.
"""

import torch

from bench.engines import Job, Running, require, version_of
from bench.engines.fsdp2 import sharded
from bench.workload import ADAMW


def start(job: Job) -> Running:
    torchao = require("torchao.optim")
    if job.clip is not None:
        raise ValueError("torchao's CPU offload optimizer cannot clip by the norm: ask for torchao:clip=none")
    model = sharded(job, offload=False)
    optimizer = torchao.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*job.data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Running(step=step, version=version_of("torchao"))
