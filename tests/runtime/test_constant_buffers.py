"""What comes and goes does not grow with the model: on the device for a given budget, on the host beside states on disk."""

import pytest
import torch
from torch import nn

import unwall
from unwall.plans import Plan
from unwall.shards.build import plan_groups, sizes_of
from unwall.shards.home import DISK
from unwall.shards.placement import place
from unwall.shards.working import host_working_bytes, working_bytes

BUDGET = 512 << 10


def peaks(depth, width, folder):
    """Device and host memory at most, of a model whose states all lie on disk: buffers and nothing else."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    tiers = dict.fromkeys(("params", "grads", "optimizer"), "disk")
    unwall.shard(model, Plan(compute_dtype=torch.float32, device_bytes=BUDGET, disk=folder, **tiers))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3, speculate=False)
    for _ in range(2):
        model(torch.randn(2, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = unwall.stats(model).tiers
    return found["device"].peak_bytes, found["host"].peak_bytes


def test_buffers_of_a_model_twice_as_deep_and_twice_as_wide(tmp_path):
    device, host = peaks(3, 256, str(tmp_path))
    assert device <= BUDGET
    for depth, width in ((6, 256), (3, 512), (6, 512)):
        more_device, more_host = peaks(depth, width, str(tmp_path))
        assert more_device <= BUDGET
        assert more_host <= host * 1.01, (depth, width)


@pytest.mark.parametrize("plan", [Plan(), Plan(device_bytes="4GiB")], ids=["no budget", "budget"])
def test_buffers_of_models_of_real_sizes(plan):
    """Nothing is allocated: what the groups' sizes say, for 13 and for 26 billion parameters over 8 ranks."""

    def buffers(depth):
        with torch.device("meta"):
            layers = [nn.Sequential(nn.Linear(8192, 32768), nn.Linear(32768, 8192)) for _ in range(depth)]
        planned = plan_groups(nn.Sequential(*layers), plan, 8)
        sizes = sizes_of(planned, plan, 8)
        homes = place(sizes, Plan(params="host", optimizer="host"), None)
        return working_bytes(sizes, homes), host_working_bytes(sizes, [DISK] * len(sizes))

    assert buffers(48) == buffers(24)
