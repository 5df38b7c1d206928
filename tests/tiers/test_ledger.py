"""Live and peak bytes against a budget."""

import threading

import pytest

from unwall.tiers.ledger import BudgetError, Ledger


def test_live_and_peak():
    ledger = Ledger("host")
    ledger.reserve(100)
    ledger.reserve(50)
    ledger.release(120)
    assert (ledger.live_bytes, ledger.peak_bytes, ledger.free_bytes) == (30, 150, None)
    ledger.reset_peak()
    assert ledger.peak_bytes == 30


def test_past_the_budget_raises_with_the_numbers_and_counts_nothing():
    ledger = Ledger("host", 1000)
    ledger.reserve(600)
    with pytest.raises(
        BudgetError, match=r"host tier: moments needs 401 B \(401 bytes\), but 600 B .*1000 bytes.*host_bytes"
    ) as caught:
        ledger.reserve(401, "moments")
    error = caught.value
    assert (error.tier, error.asked_bytes, error.live_bytes, error.budget_bytes) == ("host", 401, 600, 1000)
    assert (ledger.live_bytes, ledger.peak_bytes, ledger.free_bytes) == (600, 600, 400)
    ledger.reserve(400)
    assert ledger.free_bytes == 0


def test_a_budget_of_zero_refuses_everything():
    ledger = Ledger("disk", 0)
    with pytest.raises(BudgetError, match="disk tier: a request needs 1 B"):
        ledger.reserve(1)
    assert ledger.peak_bytes == 0


def test_a_negative_budget_is_refused():
    with pytest.raises(ValueError, match="device_bytes must not be negative, got -1"):
        Ledger("device", -1)


def test_more_released_than_live_is_refused():
    ledger = Ledger("device")
    ledger.reserve(10)
    with pytest.raises(RuntimeError, match="device tier: 11 bytes released, but only 10 are live"):
        ledger.release(11)
    assert ledger.live_bytes == 10


def test_threads_never_pass_the_budget_and_lose_no_byte():
    ledger = Ledger("host", 5)
    too_much, refused = [], []

    def work() -> None:
        for _ in range(2000):
            try:
                ledger.reserve(3)
            except BudgetError:
                refused.append(1)
                continue
            if ledger.live_bytes > 5:
                too_much.append(ledger.live_bytes)
            ledger.release(3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not too_much
    assert (ledger.live_bytes, ledger.peak_bytes) == (0, 3)
