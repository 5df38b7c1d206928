"""Small models and machines for the planner's tests."""

import torch
from torch import nn

from unwall.planner.hardware import Hardware
from unwall.planner.job import Job, Workload, make_job
from unwall.planner.outline import Outline, outline_of
from unwall.plans import Plan

MACHINE = Hardware(
    name="box", devices_per_node=1, device_bytes=1 << 30, host_bytes=4 << 30, disk_bytes=1 << 36, host_to_device_bytes_per_s=1e9,
    device_to_host_bytes_per_s=1e9, host_memory_bytes_per_s=1e10, disk_read_bytes_per_s=2e8, disk_write_bytes_per_s=2e8,
    disk_endurance_bytes=1e15, matmul_flops_per_s={"bfloat16": 1e12, "float32": 1e11}, block_flops_per_s={"bfloat16": 5e11},
    device_memory_bytes_per_s=1e11,
)  # fmt: skip


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, _, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(q + v)
        return x + self.down(torch.relu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, width=64, layers=6, vocab=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def decoder(**sizes: int) -> Outline:
    with torch.device("meta"):
        return outline_of(Decoder(**sizes))


def job(plan: Plan, ranks: int = 1, outline: Outline | None = None, host: int | None = None, **load) -> Job:
    return make_job(outline or decoder(), plan, ranks, Workload(**load), plan.budget_device_bytes, host)
