"""The virtual clock."""

import pytest

from unwall.planner.simulation.clock import Clock


def test_queues_run_beside_each_other_and_their_tasks_in_order():
    clock = Clock({})
    first, second = clock.submit("a", 2), clock.submit("a", 3)
    other = clock.submit("b", 4)
    clock.wait(other)
    assert clock.now_s == pytest.approx(4)
    assert (first.done, second.done) == (True, False)
    clock.wait(second)
    assert clock.now_s == pytest.approx(5)
    assert clock.busy_s == {"a": 5, "b": 4}


def test_a_task_waits_for_what_it_is_after_and_holds_up_its_queue():
    clock = Clock({})
    slow = clock.submit("disk", 10)
    clock.submit("update", 1, [slow])
    last = clock.submit("update", 1)  # could run at once, but the queue is first in, first out
    clock.wait(last)
    assert clock.now_s == pytest.approx(12)


@pytest.mark.parametrize(("capacity", "end"), [(2.0, 6), (1.0, 12), (1.5, 8)])
def test_a_shared_limit_slows_all_alike(capacity, end):
    clock = Clock({"link": capacity})
    tasks = [clock.submit(queue, 6, loads={"link": 1.0}) for queue in "ab"]
    for task in tasks:
        clock.wait(task)
    assert clock.now_s == pytest.approx(end)


def test_speed_comes_back_when_the_other_is_done():
    clock = Clock({"cores": 1.0})
    short, long = clock.submit("a", 1, loads={"cores": 1.0}), clock.submit("b", 4, loads={"cores": 1.0})
    clock.wait(short)
    assert clock.now_s == pytest.approx(2)
    clock.wait(long)
    assert clock.now_s == pytest.approx(5)


def test_drain_and_tasks_that_take_no_time():
    clock = Clock({})
    clock.submit("a", 0)
    clock.submit("a", 3)
    clock.drain("a", "nothing was ever put here")
    assert clock.now_s == pytest.approx(3)


def test_a_circle_is_an_error_and_not_a_hang():
    clock = Clock({})
    first = clock.submit("a", 1, name="first")
    second = clock.submit("b", 1, [first], name="second")
    first.after.append(second)
    with pytest.raises(RuntimeError, match="a: first, b: second"):
        clock.wait(second)
