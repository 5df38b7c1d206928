"""Ranks that come to different exchanges: an error on every rank that says where each is. gloo alone would end the process."""

import signal

import pytest
import torch
import torch.distributed as dist
from models import NestedNet
from ranks import rank_and_world
from reference import seeded, vectors
from torch.distributed.device_mesh import DeviceMesh

import unwall
from unwall.native import interrupts
from unwall.plans import Plan
from unwall.shards.collectives import Ranks
from unwall.shards.control import DivergedError

FP32 = Plan(compute_dtype=torch.float32)


def take_part(ranks, what):
    match what:
        case "a row":
            ranks.control.exchange("announcements", [1, 2, 3, 4, 5, 6, 7, 8, 9], "the end of a forward")
        case "many words":
            ranks.control.exchange("gradients", [5] * 100, "the gradients of a group")
        case "other words":
            ranks.control.exchange("gradients", [5] * 99, "the gradients of a group")
        case "an object":
            ranks.every(list(range(1000)))
        case "rank 0's object":
            ranks.broadcast_object("something")
        case "bytes":
            part = torch.zeros(4096, dtype=torch.uint8)
            ranks.all_gather_on_host(torch.empty(ranks.size * part.numel(), dtype=torch.uint8), part)


def come_to(whats):
    """Each rank comes to another exchange; and then once more to the same."""
    ranks = Ranks(dist.new_group([0, 1]))
    errors = []
    for what in (whats[ranks.rank], "a row"):
        try:
            take_part(ranks, what)
        except DivergedError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(
    "whats",
    [("rank 0's object", "a row"), ("bytes", "an object"), ("many words", "other words")],
)
def test_ranks_at_different_exchanges_are_told(ranks, whats):
    for rank, errors in enumerate(ranks(2).run(come_to, whats)):
        assert len(errors) == 2, errors
        assert f"rank {rank} is at" in errors[0]
        assert f"rank {1 - rank}" in errors[0]
        assert "cannot go on" in errors[1]


def find_a_backend_broken():
    """As NCCL does where a rank was killed: the call itself raises. gloo says it while it is waited for."""
    ranks, values = Ranks(dist.new_group([0, 1])), torch.zeros(4)
    errors = []
    if ranks.rank == 0:

        def broken(*_args, **_options):
            raise dist.DistBackendError("remote process exited")

        kept, dist.all_to_all_single = dist.all_to_all_single, broken
        try:
            ranks.reduce_scatter(torch.empty(2), values)
        except DivergedError as error:
            errors.append(str(error))
        finally:
            dist.all_to_all_single = kept
    try:
        take_part(ranks, "a row")
    except DivergedError as error:
        errors.append(str(error))
    return errors


def test_a_collective_that_cannot_begin_ends_all_ranks(ranks):
    first, second = ranks(2).run(find_a_backend_broken)
    assert "rank 0 is at reduce-scatter" in first[0]
    assert "remote process exited" in first[0]
    assert "cannot go on" in first[1]
    assert "remote process exited" in second[0]


def one_shards_another_runs():
    """Rank 0 builds a second model while rank 1 runs the first one."""
    rank, _ = rank_and_world()
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")
    model = seeded(NestedNet)
    unwall.shard(model, FP32, mesh)
    try:
        if rank == 0:
            unwall.shard(seeded(NestedNet), FP32, mesh)
        else:
            model(vectors()[0])
    except DivergedError as error:
        return str(error)
    return ""


def test_one_rank_shards_while_another_runs(ranks):
    errors = ranks(2).run(one_shards_another_runs)
    assert all("something else" in error for error in errors), errors


def leave_half_way():
    """Rank 0 is interrupted twice while it waits in an exchange."""
    ranks = Ranks(dist.new_group([0, 1]))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.install()
    if ranks.rank == 0:
        ranks.control.wait = lambda work, where: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    try:
        take_part(ranks, "a row")
        take_part(ranks, "an object")
    except (KeyboardInterrupt, DivergedError) as error:
        return type(error).__name__, str(error)
    finally:
        signal.signal(signal.SIGINT, before)
    return None


def test_a_rank_that_leaves_an_exchange_tells_the_others(ranks):
    (own, _), (told, text) = ranks(2).run(leave_half_way)
    assert (own, told) == ("KeyboardInterrupt", "DivergedError")
    assert "rank 0 left the end of a forward half way" in text
