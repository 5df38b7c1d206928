"""Learning what the ranks do together, and following it: bookkeeping alone, without ranks."""

from unwall.schedule.script import GATHER, MOST_ENTRIES, MOST_REPEATS, REDUCE, Book, Follow, Op, Turn, fingerprint


def gathers(*groups):
    return tuple(Turn(Op(GATHER, group)) for group in groups)


def test_turns_in_their_order():
    follow = Follow(gathers(0, 1, 2))
    for group in range(3):
        assert follow.is_next(Op(GATHER, group))
        assert list(follow.go_to(Op(GATHER, group))) == [Turn(Op(GATHER, group))]
    assert list(follow.go_to_end()) == []
    assert not follow.is_next(Op(GATHER, 2))


def test_turns_before_the_one_that_is_needed_are_served():
    follow = Follow(gathers(0, 1, 2, 3))
    assert list(follow.go_to(Op(GATHER, 2))) == list(gathers(0, 1, 2))
    assert list(follow.go_to_end()) == list(gathers(3))


def test_turns_that_were_not_taken_are_left():
    follow = Follow(gathers(0, 1, 2))
    turns = follow.go_to(Op(GATHER, 2))
    assert next(turns).op == Op(GATHER, 0)
    assert follow.is_next(Op(GATHER, 1))  # something failed meanwhile
    assert list(follow.go_to_end()) == list(gathers(1, 2))


def test_what_does_not_come_any_more_changes_nothing():
    follow = Follow((*gathers(0, 1), Turn(Op(REDUCE, 0))))
    list(follow.go_to(Op(GATHER, 0)))
    assert follow.go_to(Op(GATHER, 0)) is None
    assert follow.go_to(Op(REDUCE, 1)) is None
    assert follow.is_next(Op(GATHER, 1))


def test_a_group_that_is_gathered_twice_has_two_turns():
    follow = Follow(gathers(0, 1, 0))
    assert list(follow.go_to(Op(GATHER, 0))) == list(gathers(0))
    assert list(follow.go_to(Op(GATHER, 0))) == list(gathers(1, 0))


def test_the_fingerprint_is_of_what_all_ranks_share():
    one = (Turn(Op(GATHER, 0)), Turn(Op(REDUCE, 0), (3,), True, (1,)))
    other = (Turn(Op(GATHER, 0), wanted=False), Turn(Op(REDUCE, 0), (3,), True, (2,)))
    assert fingerprint(one) == fingerprint(other) == fingerprint(list(one))
    different = [(), one[:1], one[::-1], (one[0], Turn(Op(REDUCE, 0), (1,))), (one[0], Turn(Op(REDUCE, 1), (3,)))]
    assert len({fingerprint(script) for script in (one, *different)}) == 6
    assert all(0 < fingerprint(script) < 1 << 62 for script in (one, *different))


def test_one_recording_of_a_predicted_pass_is_enough():
    book = Book()
    assert book.expected("here") is None
    book.learn("here", gathers(0, 1))
    assert book.expected("here") == gathers(0, 1)
    assert book.expected("there") is None


def test_two_recordings_of_passes_that_were_not_predicted():
    book = Book()
    book.learn("here", gathers(0), steady=False)
    assert book.expected("here") is None
    book.learn("here", gathers(0), steady=False)
    assert book.expected("here") == gathers(0)


def test_a_first_pass_without_a_prediction_delays_nothing():
    book = Book()
    book.learn("here", gathers(0), steady=False)
    book.learn("here", gathers(0, 1))
    assert book.expected("here") == gathers(0, 1)


def recordings_until_expected(book, script):
    for count in range(1, 100):
        book.learn("here", script)
        if book.expected("here"):
            return count
    raise AssertionError("never expected")


def test_each_failure_asks_for_more_equal_recordings_and_each_success_for_fewer():
    book = Book()
    needed = [recordings_until_expected(book, gathers(0))]
    for _ in range(5):
        book.failed("here")
        assert book.expected("here") is None
        needed.append(recordings_until_expected(book, gathers(0)))
    assert needed == [1, 2, 4, MOST_REPEATS, MOST_REPEATS, MOST_REPEATS]
    book.held("here")
    book.held("here")
    book.failed("here")
    assert recordings_until_expected(book, gathers(0)) == MOST_REPEATS // 2


def test_a_loop_that_changes_all_the_time_expects_nothing():
    book = Book()
    book.learn("here", gathers(0))
    book.failed("here")
    for count in range(20):
        book.learn("here", gathers(count % 2))
        assert book.expected("here") is None


def test_another_recording_takes_the_place_of_the_one_before():
    book = Book()
    book.learn("here", gathers(0))
    book.learn("here", gathers(1))
    assert book.expected("here") is None  # something else was expected: it may change back
    book.learn("here", gathers(1))
    assert book.expected("here") == gathers(1)


def test_the_roles_are_those_of_the_last_recording():
    book = Book()
    book.learn("here", gathers(0))
    served = (Turn(Op(GATHER, 0), wanted=False),)
    book.learn("here", served)
    assert book.expected("here") == served


def test_old_situations_make_room():
    book = Book()
    for number in range(MOST_ENTRIES + 1):
        book.learn(number, gathers(0))
    assert book.expected(0) is None
    assert book.expected(1) is not None


def test_a_verdict_on_something_forgotten_is_ignored():
    book = Book()
    book.failed("here")
    book.held("here")
    book.learn("here", gathers(0))
    assert book.expected("here") == gathers(0)
