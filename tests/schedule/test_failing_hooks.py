"""The user's own code around a step raises on one rank, or on all of them: hooks, options that make no sense, other numbers."""

import time
from pathlib import Path

import pytest

from faults import Boom, forward, same, sharded
from ranks import rank_and_world

import unwall
from unwall.schedule import standing
from unwall.shards.control import DivergedError, PeerError

STEPS = 4


def await_the_other(path):
    """Without using the model. A test that waits for ever is ended by its limit."""
    while not path.exists():
        time.sleep(0.01)


def hook_of(optimizer, kind, rank, bad, when):
    """Raises once on the ranks that are ``bad``, in the step of that number."""

    def raising(*_):
        if raising.number == when and rank in bad:
            raising.number = -1
            raise Boom("told to")

    raising.number = 0
    register = optimizer.register_step_pre_hook if kind == "pre" else optimizer.register_step_post_hook
    register(raising)
    return raising


def train(folder, tier="host", kind="pre", bad=(), when=2, max_grad_norm=None):
    """The whole model (rank 0), and what this rank was told. A rank that failed alone waits until the other has heard of it."""
    model, optimizer = sharded(tier, folder)
    optimizer.max_grad_norm = max_grad_norm
    rank, told, heard = rank_and_world()[0], [], Path(folder) / f"{tier}-{kind}-{bad}-{max_grad_norm}"
    hook = hook_of(optimizer, kind, rank, bad, when)
    patience, standing.ALIKE_S = standing.ALIKE_S, standing.ALIKE_S if len(bad) > 1 else 0.0
    try:
        for number in range(STEPS):
            hook.number = number if hook.number >= 0 else -1
            for _ in range(3):
                stepped = False
                try:
                    forward(model, number).backward()
                    optimizer.step()
                    break
                except Boom as error:
                    told.append((type(error).__name__, str(error), getattr(error, "__notes__", [])))
                    if len(bad) == 1:
                        await_the_other(heard)
                    stepped = kind == "post"
                except DivergedError as error:
                    told.append((type(error).__name__, str(error), []))
                    heard.touch()
                    if not isinstance(error, PeerError):
                        return None, told
                optimizer.zero_grad()
                if stepped:
                    break
        return model.state_dict(), told
    finally:
        standing.ALIKE_S = patience


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_hook_that_raises_on_all_ranks_is_their_own_matter(ranks, tmp_path, kind, max_grad_norm):
    """They try again (before the step) or go on (after it), in whatever way they agree on what comes next."""
    expected = ranks(2).run(train, str(tmp_path), max_grad_norm=max_grad_norm)[0][0]
    every = ranks(2).run(train, str(tmp_path), kind=kind, bad=(0, 1), max_grad_norm=max_grad_norm, limit_s=60)
    assert same(expected, every[0][0])
    for _, told in every:
        assert told == [("Boom", "told to", [])]


def test_nobody_has_taken_the_step_before_which_a_hook_raises(ranks, tmp_path):
    """With gradients on disk the ranks meet before the update: all go on together."""
    expected = ranks(2).run(train, str(tmp_path), tier="disk")[0][0]
    (got, told), (_, own) = ranks(2).run(train, str(tmp_path), tier="disk", bad=(1,), limit_s=60)
    assert same(expected, got)
    assert [name for name, *_ in own] == ["Boom"]
    assert [name for name, *_ in told] == ["PeerError"]
    assert "rank 1 failed: Boom: told to" in told[0][1]


def test_a_hook_after_the_step_raises_on_one_rank(ranks, tmp_path):
    (_, told), (_, own) = ranks(2).run(train, str(tmp_path), kind="post", bad=(1,), limit_s=60)
    assert [name for name, *_ in own] == ["Boom"]
    assert [name for name, *_ in told] == ["PeerError"]
    assert "rank 1 failed: Boom: told to" in told[0][1]
