"""How the benchmark of compressed communication compares rows that took turns on a machine that was busy for a while."""

from bench.compressed import Round, compared


def rounds_of(*seconds):
    return [Round(each, 10_000_000, 10_500_000) for each in seconds]


def test_a_round_on_a_busy_machine_changes_nothing():
    plain, packed = rounds_of(4.0, 12.0, 4.0), rounds_of(2.0, 6.0, 2.0)
    found = compared(packed, plain, expected_s=2.2)
    assert (found["seconds"], found["faster"], found["off"]) == (2.0, 2.0, 0.1)
    assert found["rounds"] == [2.0, 6.0, 2.0]
    alone = compared(rounds_of(2.0, 2.0, 9.0), plain, expected_s=2.0)  # and where only one of the two was disturbed
    assert (alone["seconds"], alone["faster"]) == (2.0, 2.0)
