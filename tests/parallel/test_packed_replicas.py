"""Gradients that travel between the replicas of a mesh as small integers."""

import itertools
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from counted_card import CountedCard
from offload import DEVICE, DISK, HOST, differing
from parallel_tools import batch, build, loss_of, mesh_of

import unwall
from unwall.plans import Plan, PlanError
from unwall.shards.collectives import Ranks
from unwall.shards.compress import Codec
from unwall.shards.packed_average import PackedAverage
from unwall.tiers.workers import shared_pool

INT8, INT4 = {"reduce_dtype": "int8"}, {"reduce_dtype": "int4"}
FEEDBACK = {**INT4, "reduce_feedback": True}
BF16, FP16 = torch.bfloat16, torch.float16


def trained(fields, folder, shape=(2, 2)):
    """What two steps of two passes give on this rank: gradients as they are seen, everything that was trained, and what came
    from other replicas, in bytes per element."""
    mesh = mesh_of(dp_replicate=shape[0], dp_shard=shape[1])
    model = build()
    kept = {"keep_fp32": lambda name, _: "norm" in name, "disk": folder, "passes": 2}
    unwall.shard(model, Plan(**{**kept, **fields}), mesh)
    optimizer, seen = unwall.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0), {}
    for step, more in itertools.product(range(2), range(2)):
        tokens, target = batch(2 * step + more, dist.get_rank())
        loss_of(model(tokens), target).backward()
        if more:
            seen |= {f"{step}.{name}": param.grad.clone() for name, param in model.named_parameters()}
            again = {f"{step}.{name}": param.grad.clone() for name, param in model.named_parameters()}
            assert all(torch.equal(again[name], seen[name]) for name in again)  # a second look averages nothing
            optimizer.step()
            optimizer.zero_grad()
    found = unwall.stats(model).collectives["replicas"]
    return seen, {name: value.clone() for name, value in model.state_dict().items()}, found.bytes / found.elements


def compared(fields, places, folder, shape=(2, 2)):
    """What differs between tiers, between two runs, and between the replicas; how far gradients are from exact ones, and the
    bytes per element."""
    exact, _, _ = trained({**DEVICE, **{name: fields[name] for name in fields if name == "compute_dtype"}}, folder, shape)
    first, state, nbytes = trained({**DEVICE, **fields}, folder, shape)
    wrong = []
    for place in places:
        seen, kept, _ = trained({**place, **fields}, folder, shape)
        wrong += differing(first, seen) + differing(state, kept)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, first)
    wrong += [name for name in first for theirs in every if not torch.equal(theirs[name], first[name])]
    far = max(float((first[name] - exact[name]).norm() / exact[name].norm()) for name in first if name.startswith("0."))
    norms = [name for name in first if name.startswith("0.") and "norm" in name and not torch.equal(first[name], exact[name])]
    return wrong, norms, far, nbytes


@pytest.mark.parametrize(
    ("fields", "places", "most", "per_element"),
    [
        (INT8, [HOST, DISK], 0.03, 1.016),
        ({**FEEDBACK, "compute_dtype": BF16}, [HOST], 0.6, 0.516),
        ({**INT8, "stage": 0, "compute_dtype": FP16}, [DEVICE], 0.03, 1.016),
    ],
    ids=str,
)
def test_replicas_come_to_the_same_bits_with_fewer_bytes(ranks, tmp_path, fields, places, most, per_element):
    for wrong, norms, far, nbytes in ranks(4).run(compared, fields, places, str(tmp_path)):
        assert wrong == []
        assert norms == []  # what computes in fp32 travels as it is
        assert 0 < far < most
        assert per_element < nbytes < 2  # groups in fp32 are among them


def clipped_by_torch(fields, folder):
    """The norm of the gradients before and after torch has clipped them to a thousandth, and what each rank has then."""
    model = build()
    unwall.shard(model, Plan(**DEVICE, disk=folder, compute_dtype=BF16, **fields), mesh_of(dp_replicate=2, dp_shard=1))
    tokens, target = batch(0, dist.get_rank())
    loss_of(model(tokens), target).backward()
    before = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    grads = [param.grad.float() for param in model.parameters()]
    return float(before), float(torch.stack([grad.norm() for grad in grads]).norm()), grads


@pytest.mark.parametrize("fields", [INT4, FEEDBACK], ids=str)
def test_what_torch_has_clipped_after_an_average_stays_clipped(ranks, tmp_path, fields):
    first, second = ranks(2).run(clipped_by_torch, fields, str(tmp_path))
    assert first[0] > 0.5
    assert first[1] == pytest.approx(1e-3, rel=0.02)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[2], second[2], strict=True))


def within_the_budget_named():
    """The least ``host_bytes`` that a refusal names, what the host holds with that after a step, and the parameters. With a byte
    less, ``shard`` and ``move`` refuse."""
    mesh, fields = mesh_of(dp_replicate=2, dp_shard=1), {**DEVICE, **FEEDBACK, "compute_dtype": BF16}
    with pytest.raises(PlanError, match="host_bytes") as refused:
        unwall.shard(build(), Plan(**fields, host_bytes=1), mesh)
    least = refused.value.lack[1]
    with pytest.raises(PlanError, match="host_bytes"):
        unwall.shard(build(), Plan(**fields, host_bytes=least - 1), mesh)
    model = build()
    unwall.shard(model, Plan(**fields, host_bytes=least), mesh)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    loss_of(model(batch(0, dist.get_rank())[0]), batch(0, dist.get_rank())[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(PlanError, match="host_bytes"):
        unwall.move(model, Plan(**fields, host_bytes=least - 1))
    return least, unwall.stats(model).tiers["host"].peak_bytes, sum(param.numel() for param in build().parameters())


def test_what_feedback_over_replicas_keeps_is_in_the_budget_of_the_host(ranks):
    for least, peak, numel in ranks(2).run(within_the_budget_named):
        assert peak == least
        assert 2 * numel <= least < 2 * numel + 20_000  # whole blocks of each group


def averaged(rounds):
    """Four replicas average the same values ``rounds`` times with 4 bits: what comes each time, what each one put in, and the
    bytes per element."""
    ranks = Ranks(dist.group.WORLD)
    way = PackedAverage(ranks, Codec(4, shared_pool))
    torch.manual_seed(dist.get_rank())
    values, residual = torch.randn(5000).to(BF16), torch.zeros(5000)
    found = torch.stack([way.average(values, seed=number, residual=residual).float() for number in range(rounds)])
    return found, values.float(), ranks.traffic.reduced_bytes / rounds / 5120


def test_many_replicas_average_in_parts_and_feedback_loses_nothing(ranks):
    every = ranks(4).run(averaged, 8)
    exact = torch.stack([values for _, values, _ in every]).mean(0)
    for found, _, nbytes in every:
        assert torch.equal(found, every[0][0])
        assert found.shape == (8, 5000)
        assert nbytes == pytest.approx(3 / 4 * (0.516 + 2), rel=0.01)
        assert float((found[0] - exact).norm() / exact.norm()) > 0.1
        assert float((found.mean(0) - exact).norm() / exact.norm()) < 0.06  # an eighth of what one rounding leaves


def let_go_between(device, card):
    """What an average takes is counted by itself: gloo's thread lets go of what the one before has gathered in its own time."""
    noting = device.noting

    @contextmanager
    def alone(nbytes, label):
        end = time.monotonic() + 30
        while card.others_bytes and time.monotonic() < end:
            time.sleep(1e-3)
        with noting(nbytes, label):
            yield

    device.noting = alone


def taken(fields, folder):
    """What averages took on the device at most, beyond what is there: by the ledger, and counted."""
    model = build()
    plan = Plan(**{**HOST, **fields, "compute_dtype": BF16, "disk": folder})
    unwall.shard(model, plan, mesh_of(dp_replicate=dist.get_world_size(), dp_shard=1))
    engine = unwall.api.engine(model)
    tokens, target = batch(0, dist.get_rank())
    loss_of(model(tokens), target).backward()
    engine.executor.drop_cache()
    ledger, card = engine.device.ledger, CountedCard()
    let_go_between(engine.device, card)
    before = ledger.live_bytes
    ledger.reset_peak()
    with card:
        engine.replicas.average(engine)
    return ledger.peak_bytes - before, card.most_bytes, ledger.live_bytes - before


@pytest.mark.parametrize(("fields", "size"), [({}, 2), (FEEDBACK, 2), (INT8, 4)], ids=str)
def test_what_an_average_takes_is_on_the_ledger(ranks, tmp_path, fields, size):
    for noted, counted, left in ranks(size).run(taken, fields, str(tmp_path)):
        assert 0 < counted <= noted < 2 * counted
        assert left == 0
