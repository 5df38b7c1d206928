"""Tensor, pipeline and ZeRO-3 ranks over NCCL, two on one GPU, against plain PyTorch. Run on a GPU machine, as test_nccl.py."""

import pytest
import torch
from parallel_tools import ADAMW, CLIP, batch, build, loss_of, mesh_of, spread, train_plain
from ranks import RankPool
from torch import nn

import unwall

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]

STEPS = 5
TIERS = {"resident": {}, "host": {"params": "host", "optimizer": "host", "device_bytes": "2MiB"}}


def layers():
    plain = build()
    return nn.Sequential(plain.embed, *plain.blocks, plain.norm, plain.head)


def trained(dimension, where):
    """What this rank has of the model after training, and the norms."""
    mesh = mesh_of("cuda", **{dimension: 2})
    plan = unwall.Plan(compute_dtype=torch.float32, **where)
    schedule, rank = None, mesh.get_local_rank()
    if dimension == "pp":
        part, schedule = unwall.pipeline(layers().cuda(), plan, mesh=mesh, microbatches=4, loss=loss_of)
    else:
        part = build().cuda()
        part = unwall.shard(spread(part, mesh, "plain") if dimension == "tp" else part, plan, mesh)
    optimizer = unwall.AdamW(part.parameters(), **ADAMW, max_grad_norm=CLIP)
    norms = []
    for step in range(STEPS):
        tokens, target = (rows.cuda() for rows in batch(step, rank if dimension == "dp" else 0))
        if schedule is None:
            loss_of(part(tokens), target).backward()
        else:
            schedule.step(*([tokens] if rank == 0 else []), **({"target": target, "losses": []} if rank == 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    return {name: value.cpu() for name, value in part.state_dict().items()}, norms


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool(2, "nccl")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dimension", ["tp", "pp", "dp"])
def test_two_ranks_agree_with_one(dimension, tier, pool):
    reference, expected = train_plain(layers() if dimension == "pp" else build(), STEPS, 2 if dimension == "dp" else 1)
    found = {}
    for values, norms in pool.run(trained, dimension, TIERS[tier]):
        assert norms == pytest.approx(expected, rel=1e-4)
        found.update(values)
    assert found.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
