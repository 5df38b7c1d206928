"""The line of updates ahead of their step: which is next, and which are not begun any more."""

from itertools import permutations, product

import pytest

from unwall.optim.speculation import Progress, Speculation, Speculations, Wanted

COUNT = 4


class Landing:
    """The copy of a gradient."""

    def __init__(self, landed):
        self.landed = landed

    def done(self):
        return self.landed

    def wait(self, timeout=None):
        self.landed = True


def speculation(landed=True, compute=lambda: None):
    return Speculation(None, False, {}, [], 0, 0, Landing(landed), compute)


def line(landed):
    """Speculations on groups 0, 1, 2 ... in the order of landing, and the list of those that ran."""
    speculations, order, made = Speculations(), [], []
    for number, there in enumerate(landed):
        made.append(speculation(there, lambda number=number: order.append(number)))
        speculations.add((0, number), made[-1])
    return speculations, made, order


@pytest.mark.parametrize("landed", list(product([False, True], repeat=COUNT)))
def test_the_newest_that_has_landed_is_next_and_otherwise_the_oldest(landed):
    speculations, made, order = line(landed)
    for number, found in enumerate(made):
        newest = max((other for other in range(COUNT) if landed[other]), default=None)
        assert speculations.is_next(found) == (number == (0 if newest is None else newest))
    for _ in range(COUNT):
        speculations.run_next()
    there = [number for number in range(COUNT) if landed[number]]
    assert order == [*reversed(there), *(number for number in range(COUNT) if not landed[number])]
    assert all(found.progress is Progress.FINISHED for found in made)


@pytest.mark.parametrize("wanted", list(product(Wanted, repeat=COUNT)))
def test_only_what_is_wanted_is_begun(wanted):
    speculations, made, order = line([True] * COUNT)
    for found, wish in zip(made, wanted, strict=True):
        found.want(wish)
    for _ in range(COUNT):
        speculations.run_next()
    assert order == [number for number in reversed(range(COUNT)) if wanted[number] is Wanted.YES]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_each_group_has_its_own_which_is_taken_once(order):
    speculations, made, _ = line([True] * 3)
    for number in order:
        assert speculations.take((0, number)) is made[number]
        assert speculations.take((0, number)) is None
    assert speculations.open() == []


def test_what_is_forgotten_is_not_begun_and_what_was_taken_is():
    speculations, made, order = line([True] * 3)
    speculations.take((0, 1))
    speculations.forget()
    for _ in range(3):
        speculations.run_next()
    assert order == [1]
    assert [found.settled for found in made] == [True, False, True]


def test_a_failure_is_kept_for_the_step():
    def fail():
        raise OSError("the disk")

    speculations = Speculations()
    found = speculation(compute=fail)
    speculations.add((0, 0), found)
    speculations.run_next()
    assert found.progress is Progress.FAILED
    assert speculations.take((0, 0)) is found
