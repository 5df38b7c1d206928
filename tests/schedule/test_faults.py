"""One rank fails in the middle of training: it raises its own error, the others one that names it, and all go on together.

The loop is what a user would write: any of these errors means forget the gradients and run the batch again.
"""

import pytest
from faults import look, same, train

WHEN = (1, 3)
"""The first steps negotiate, the later ones follow a script."""
CASES = [
    ("disk", "disk"),
    ("disk", "memory"),
    ("host", "budget"),
    ("device", "memory"),
    ("device", "user"),
    ("host", "interrupt"),
]


_expected = {}


def _undisturbed(ranks, tier, folder):
    if tier not in _expected:
        _expected[tier] = ranks(2).run(train, tier, folder)[0][0]
    return _expected[tier]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("tier", "kind"), CASES)
def test_all_ranks_go_on_after_a_fault_of_one(ranks, tier, kind, phase, tmp_path):
    expected = _undisturbed(ranks, tier, str(tmp_path))
    for when in WHEN:
        (got, told), (_, own) = ranks(2).run(train, tier, str(tmp_path), kind, phase, when)
        assert same(expected, got), (when, told, own)
        assert [name for name, _ in own] != [], "the fault did not strike"
        assert [name for name, _ in told] == ["PeerError"], told
        assert "rank 1 failed" in told[0][1]


def test_all_ranks_go_on_after_an_update_that_failed_on_one(ranks, tmp_path):
    expected = _undisturbed(ranks, "disk", str(tmp_path))
    (got, told), (_, own) = ranks(2).run(train, "disk", str(tmp_path), "disk", "step", 2)
    assert same(expected, got), (told, own)
    assert [name for name, _ in told] == ["PeerError"], (told, own)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("evaluation", "disk"),
        ("state_dict", "disk"),
        ("state_dict of the optimizer", "disk"),
        ("load_state_dict", "disk"),
        ("full_params", "disk"),
        ("full_params", "user"),
    ],
)
def test_all_ranks_go_on_after_a_fault_outside_of_training(ranks, what, kind, tmp_path):
    expected = ranks(2).run(look, "disk", str(tmp_path), what)[0][0]
    for bad in (0, 1):
        results = ranks(2).run(look, "disk", str(tmp_path), what, kind, bad)
        assert same(expected, results[0][0]), results
        (own, _), *_ = results[bad][1]
        assert own != "PeerError", results
        assert [name for name, _ in results[1 - bad][1]] == ["PeerError"], results
        assert f"rank {bad} failed" in results[1 - bad][1][0][1]
