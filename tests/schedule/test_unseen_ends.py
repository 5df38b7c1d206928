"""A pass of one rank ends where no hook of unwall's sees it, and that rank does not use the model again for now: the others hear
of it nevertheless, and then all go on together."""

import time
from pathlib import Path

import pytest
from faults import STEPS, Fault, forward, same, sharded, train
from ranks import rank_and_world

from unwall.shards.control import PeerError

BAD = 1
WHEN = (1, 3)
"""The first steps negotiate, the later ones follow a script."""


def await_the_other(path):
    """Without using the model. A test that waits for ever is ended by its limit."""
    while not path.exists():
        time.sleep(0.01)


def train_and_wait(folder, kind, phase, when, tier="host"):
    """Like ``train``. The rank that failed waits until the other one has heard of it."""
    model, optimizer = sharded(tier, folder)
    rank, told, heard = rank_and_world()[0], [], Path(folder) / f"{tier}-{kind}-{phase}-{when}"
    for number in range(STEPS):
        strikes = (number, rank) == (when, BAD)
        while True:
            try:
                if strikes:
                    strikes = Fault(model, kind, phase) is None
                forward(model, number).backward()
                optimizer.step()
                break
            except PeerError as error:
                told.append(str(error))
                heard.touch()
            except (ArithmeticError, KeyboardInterrupt):
                await_the_other(heard)
            optimizer.zero_grad()
    return model.state_dict(), told


@pytest.mark.parametrize(("kind", "phase"), [("user", "backward"), ("interrupt", "backward"), ("interrupt", "forward")])
def test_the_others_hear_of_it(ranks, kind, phase, tmp_path):
    expected = ranks(2).run(train, "host", str(tmp_path))[0][0]
    for when in WHEN:
        (got, told), (_, own) = ranks(2).run(train_and_wait, str(tmp_path), kind, phase, when)
        assert same(expected, got), told
        assert own == []
        assert len(told) == 1
        assert f"rank 1 failed: its {phase} ended with" in told[0]
        assert "told to" in told[0]  # what the rank was handling
