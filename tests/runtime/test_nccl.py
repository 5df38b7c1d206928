"""Several ranks over NCCL, on one GPU: the engine against plain PyTorch. Run on a GPU machine, as test_gpu.py is."""

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool, rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]

WIDTH, WORLD, STEPS, PASSES = 128, 2, 6, 2
PLACEMENTS = {
    "device": {"params": "device", "optimizer": "device"},
    "host": {"params": "host", "optimizer": "host", "device_bytes": "2MiB"},
    "disk": {"params": "disk", "grads": "disk", "optimizer": "disk", "device_bytes": "2MiB"},
}


class Net(nn.Module):
    """A tied head, a frozen part, a parameter without a gradient, and experts of which each rank uses another one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(200, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(6)
        )
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(WORLD))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.blocks[2].requires_grad_(False)

    def forward(self, ids, expert=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        if expert is not None:
            x = x + self.experts[expert](x)
        return F.linear(x, self.embed.weight)


def build():
    torch.manual_seed(0)
    return Net()


def loss_of(model, step, part, rank, experts):
    """``experts``: in the last steps each rank sends its tokens through another expert."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    rows = torch.randint(0, 200, (4, 17), generator=generator).cuda()
    expert = rank if experts and step >= STEPS - 2 else None
    return F.cross_entropy(model(rows[:, :-1], expert).flatten(0, 1).float(), rows[:, 1:].flatten())


def trained(stage, placement, folder, experts):
    """On every rank: the values after training (on rank 0) and the norms."""
    rank, _ = rank_and_world()
    model = build().cuda()
    unwall.shard(model, Plan(stage=stage, compute_dtype=torch.float32, disk=folder, **PLACEMENTS[placement]))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3, max_grad_norm=0.5)
    norms = []
    for step in range(STEPS):
        for part in range(PASSES):
            (loss_of(model, step, part, rank, experts) / PASSES).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm))
    return {name: value.cpu() for name, value in model.state_dict().items()}, norms


def plain(experts):
    model = copy.deepcopy(build()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = []
    for step in range(STEPS):
        for part in range(PASSES):
            for rank in range(WORLD):
                (loss_of(model, step, part, rank, experts) / PASSES / WORLD).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}, norms


@pytest.fixture(scope="module")
def pool():
    ranks = RankPool(WORLD, "nccl")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("experts", [False, True], ids=["same way", "experts"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_agree_with_plain_pytorch(stage, placement, experts, pool, tmp_path):
    expected, expected_norms = plain(experts)
    values, norms = pool.run(trained, stage, placement, str(tmp_path), experts)[0]
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert list(values) == list(expected)
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
def held_up_by_a_copy(fields):
    """Whether what is queued while the copy of a later group is on its way from the host waits for that copy, and whether the
    outputs are those without such a wait."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).cuda()
    unwall.shard(model, Plan(params="host", optimizer="host", device_bytes="2560KiB", **fields))  # of 4 MiB in bf16
    batch = torch.ones(2, 512, device="cuda")
    for _ in range(3):  # learns the order
        expected = model(batch).clone()
    links = unwall.api.engine(model).tiers.links
    copy_now, done, slept, seen = links.copy, [], [], []

    def slow(source, target, label, *args, **kwargs):
        later = int(label.split(".")[0]) > len(done)
        if later and not slept:
            slept.append(torch.cuda.Event())
            with torch.cuda.stream(links.stream("host", "device")):
                torch.cuda._sleep(int(8e9))  # four seconds or more
                slept[0].record()
        return copy_now(source, target, label, *args, **kwargs)

    def look(*_):
        done.append(None)
        if slept and not seen:
            computed = torch.cuda.Event()
            computed.record()
            while not (computed.query() or slept[0].query()):
                time.sleep(0.001)
            seen.append(slept[0].query())

    links.copy = slow
    handles = [layer.register_forward_hook(look) for layer in model]
    output = model(batch)
    links.copy = copy_now
    for handle in handles:
        handle.remove()
    return seen, torch.equal(expected, output)


@pytest.mark.parametrize("fields", [{}, {"gather_dtype": "int8"}], ids=["as they are", "packed"])
def test_compute_does_not_wait_for_the_copies_of_later_groups(fields, pool):
    """See [Note: behind a copy] in shards/collectives.py. What the gather behind such a copy brings is right all the same."""
    assert pool.run(held_up_by_a_copy, fields) == [([False], True)] * WORLD
