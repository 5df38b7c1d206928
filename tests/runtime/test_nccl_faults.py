"""Two NCCL ranks on one GPU, of which one fails, is stopped or is killed. Run on a GPU machine, as test_nccl.py is."""

import itertools

import pytest
import ranks as support
import torch
from faults import TIERS, die_in, pause_in, same, train, undisturbed
from ranks import RankError, RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]

PHASES = ("forward", "backward", "step", "evaluation", "state_dict", "load_state_dict")
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def pool():
    started = RankPool(2, "nccl")
    yield started
    started.close()


@pytest.mark.parametrize("kind", ["memory", "user", "disk"])
@pytest.mark.parametrize("tier", TIERS)
def test_both_ranks_go_on_after_a_fault_of_one(pool, tier, kind, tmp_path):
    if kind == "disk" and tier != "disk":
        pytest.skip("no disk")
    expected = pool.run(train, tier, str(tmp_path), limit_s=LIMIT_S)[0][0]
    for phase, bad in (("forward", 1), ("backward", 0)):
        results = pool.run(train, tier, str(tmp_path), kind, phase, 3, bad, limit_s=LIMIT_S)
        assert same(expected, results[0][0]), results
        assert [name for name, _ in results[1 - bad][1]] == ["PeerError"], results
        assert f"rank {bad} failed" in results[1 - bad][1][0][1]


@pytest.mark.parametrize("tier", TIERS)
def test_a_rank_that_is_stopped_for_a_while(pool, tier, tmp_path):
    expected = pool.run(undisturbed, tier, str(tmp_path), limit_s=LIMIT_S)[0]
    for phase in PHASES:
        assert same(expected, pool.run(pause_in, tier, str(tmp_path), phase, limit_s=LIMIT_S)[0]), phase


def killed_in():
    """Each phase with each tier; a new pair of ranks for each of them takes its time, so most are drills."""
    marks = {"device": (), "host": pytest.mark.drill, "disk": pytest.mark.drill}
    return [pytest.param(phase, tier, marks=marks[tier]) for tier, phase in itertools.product(TIERS, PHASES)]


@pytest.mark.parametrize(("phase", "tier"), killed_in())
def test_a_rank_that_is_killed(phase, tier, tmp_path, monkeypatch):
    monkeypatch.setattr(support, "AFTER_FAILURE_S", LIMIT_S)
    pool = RankPool(2, "nccl")
    with pytest.raises(RankError) as failed:
        pool.run(die_in, tier, str(tmp_path), phase, limit_s=LIMIT_S)
    text = str(failed.value)
    assert "[rank 1] the process died with exit code -9" in text
    assert "did not finish" not in text
    assert "DivergedError" in text
    assert "rank 1 has ended" in text
