"""Ranks that are killed, stopped and failing in each phase, with states on each tier. What the others are told."""

import datetime
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import ranks as support
import torch.distributed as dist
from faults import TIERS, die_in, forward, pause_in, same, sharded, train, undisturbed
from ranks import RankError, RankPool, rank_and_world

import unwall
from unwall.shards import watch
from unwall.shards.control import DivergedError

pytestmark = pytest.mark.drill

PHASES = ("forward", "backward", "step", "evaluation", "state_dict", "load_state_dict")
LIMIT_S = 300.0
"""Generous: nothing here asserts how long something takes, only that it ends."""


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(support, "AFTER_FAILURE_S", LIMIT_S)


@pytest.mark.parametrize(("phase", "tier"), [pair for at, pair in enumerate(itertools.product(PHASES, TIERS))])
def test_a_rank_that_is_killed(phase, tier, tmp_path):
    pool = RankPool(2)
    with pytest.raises(RankError) as failed:
        pool.run(die_in, tier, str(tmp_path), phase, limit_s=LIMIT_S)
    text = str(failed.value)
    assert "[rank 1] the process died with exit code -9" in text
    assert "DivergedError: rank 0 " in text
    assert "rank 1 has ended (process " in text


@pytest.mark.parametrize("bad", [0, 2])
def test_one_of_three_ranks_is_killed(bad, tmp_path):
    pool = RankPool(3)
    with pytest.raises(RankError) as failed:
        pool.run(die_in, "host", str(tmp_path), "forward", bad, limit_s=LIMIT_S)
    assert str(failed.value).count("DivergedError: rank ") >= 2
    assert f"rank {bad} has ended (process " in str(failed.value)


@pytest.mark.parametrize("tier", TIERS)
def test_a_rank_that_is_stopped_for_a_while(ranks, tier, tmp_path):
    expected = ranks(2).run(undisturbed, tier, str(tmp_path))[0]
    for phase in PHASES[:4]:
        got = ranks(2).run(pause_in, tier, str(tmp_path), phase, limit_s=LIMIT_S)[0]
        assert same(expected, got), phase


def until(happened):
    end = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_stopped(process):
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def out_of_patience(folder, stopped):
    """What a rank that waits too briefly is told of one that is slow or stopped, until it was told."""
    model, optimizer = sharded("device", folder)
    for number in range(3):
        forward(model, number).backward()
        optimizer.step()
    rank, told, pids = rank_and_world()[0], Path(folder, "told"), [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1 and stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 1:
        until(told.exists)
    else:
        until(lambda: not stopped or is_stopped(pids[1]))
        watch.ANSWER_S = LIMIT_S / 2  # also where a thread does not come to answer for seconds
        unwall.api.engine(model).ranks.control.timeout = datetime.timedelta(seconds=2)
    try:
        forward(model, 4)
    except DivergedError as error:
        return str(error)
    finally:
        if rank == 0:
            told.touch()
            os.kill(pids[1], signal.SIGCONT)


@pytest.mark.parametrize("stopped", [False, True], ids=["slow", "stopped"])
def test_a_rank_that_does_not_come_is_told_from_a_dead_one(stopped, tmp_path):
    pool = RankPool(2)
    waited, late = pool.run(out_of_patience, str(tmp_path), stopped, limit_s=LIMIT_S)
    pool.close()
    assert "rank 0 is at " in waited
    assert ("rank 1 is stopped (process " if stopped else "rank 1 runs (process ") in waited
    assert stopped or "in or after forward 3" in waited
    assert "cannot go on" in late or "cannot be used any more" in late


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", ["disk", "memory", "budget", "user", "interrupt"])
def test_every_kind_of_fault_in_every_phase(ranks, tier, kind, tmp_path):
    if kind == "disk" and tier != "disk":
        pytest.skip("no disk")
    expected = ranks(2).run(train, tier, str(tmp_path))[0][0]
    for phase, when, bad in itertools.product(("forward", "backward"), (0, 2, 4), (0, 1)):
        results = ranks(2).run(train, tier, str(tmp_path), kind, phase, when, bad, limit_s=LIMIT_S)
        assert same(expected, results[0][0]), (phase, when, bad, results)
        assert all(name == "PeerError" and f"rank {bad} failed" in text for name, text in results[1 - bad][1]), results


def test_faults_of_one_of_three_ranks(ranks, tmp_path):
    expected = ranks(3).run(train, "disk", str(tmp_path))[0][0]
    for kind, bad in itertools.product(("disk", "user"), range(3)):
        results = ranks(3).run(train, "disk", str(tmp_path), kind, "backward", 3, bad, limit_s=LIMIT_S)
        assert same(expected, results[0][0]), results
        assert all([name for name, _ in results[other][1]] == ["PeerError"] for other in range(3) if other != bad), results
