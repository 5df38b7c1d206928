"""Host memory that is lent again and again."""

import weakref

import pytest

from unwall.tiers.host import HostTier
from unwall.tiers.ledger import BudgetError
from unwall.tiers.loans import Loans

NBYTES = 8192


class Work:
    """A ticket of work that ends when someone waits for it, or when told."""

    def __init__(self, error=None):
        self.waited = 0
        self.ended = False
        self.error = error

    def done(self):
        return self.ended

    def wait(self, timeout=None):
        self.waited += 1
        self.ended = True
        if self.error is not None:
            raise self.error


@pytest.fixture
def host():
    return HostTier(budget_bytes=4 * NBYTES)


def test_what_nobody_uses_is_lent_again(host):
    loans, work = Loans(host, NBYTES, 3), Work()
    block = loans.take(100, "a")
    assert block.nbytes == NBYTES
    loans.give_back(block, [work])
    other = loans.take(100, "b")
    assert other is not block, "while there may be more of them nobody waits"
    work.ended = True
    assert loans.take(NBYTES, "c") is block
    assert block.label == "c"
    assert host.ledger.live_bytes == 2 * NBYTES


def test_when_all_are_out_it_waits_for_the_first(host):
    loans = Loans(host, NBYTES, 2)
    works = [Work(), Work()]
    blocks = [loans.take(1, ""), loans.take(1, "")]
    for block, work in zip(blocks, works, strict=True):
        loans.give_back(block, [work])
    assert loans.take(1, "") is blocks[0]
    assert (works[0].waited > 0, works[1].waited) == (True, 0)


def test_where_none_comes_back_there_is_another_one_while_the_host_has_room(host):
    loans = Loans(host, NBYTES, 2)
    out = [loans.take(1, "") for _ in range(4)]
    assert len(set(map(id, out))) == 4
    with pytest.raises(BudgetError):
        loans.take(1, "")


def test_a_larger_one_takes_the_room_of_those_that_are_too_small(host):
    loans = Loans(host, NBYTES, 2)
    for _ in range(2):
        loans.give_back(loans.take(1, ""), [Work()])
    assert loans.take(3 * NBYTES, "").nbytes == 3 * NBYTES


def test_what_failed_is_told_and_keeps_its_block(host):
    loans = Loans(host, NBYTES, 1)
    block, work = loans.take(1, ""), Work(OSError("disk full"))
    loans.give_back(block, [work])
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            loans.take(1, "")
    work.error = None
    assert loans.take(1, "") is block


def test_closing_gives_back_what_is_not_used(host):
    loans = Loans(host, NBYTES, 2)
    first, second = loans.take(1, ""), loans.take(1, "")
    loans.give_back(first, [])
    loans.give_back(second, [Work()])
    loans.close()
    assert host.ledger.live_bytes == NBYTES


class Holder:
    """Who keeps a block until it is asked."""

    def __init__(self, loans):
        self.loans, self.block, self.asked = loans, loans.take(1, ""), 0

    def give_back(self):
        self.asked += 1
        if self.block is not None:
            self.loans.give_back(self.block, [Work()])
            self.block = None


def test_when_none_comes_back_those_who_hold_them_are_asked(host):
    loans = Loans(host, NBYTES, 1)
    holder = Holder(loans)
    loans.short = weakref.WeakMethod(holder.give_back)
    block = holder.block
    assert loans.take(1, "") is block
    assert holder.asked == 1
    assert loans.take(1, "") is not block, "nobody had one to give back"
    assert holder.asked == 2


def test_one_that_was_too_many_goes_when_it_comes_back(host):
    loans = Loans(host, NBYTES, 1)
    out = [loans.take(1, "") for _ in range(3)]
    for block in out:
        loans.give_back(block, [])
    loans.take(1, "")
    assert host.ledger.live_bytes == NBYTES
