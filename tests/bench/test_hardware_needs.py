"""The bandwidth that a machine needs, by hand."""

import pytest

from bench import hardware
from unwall.planner.hardware import load

SHAPE, PSI = "4x1024x8", 12 * 4 * 1024**2


def test_needs_by_hand():
    found = hardware.needs(SHAPE, 2, load(hardware.MACHINE))
    compute_s = 8 * 2 * 1024 * PSI / (0.64 * 700e12)
    shard = PSI / 8
    inputs = 2 * 2 * 1024 * 1024 * 4  # of four blocks, out and back
    moved = {
        "between devices": 3 * 2 * PSI * 7 / 8,
        "host to device": 2 * 2 * shard + inputs,
        "device to host": 2 * shard + inputs,
        "host memory": 26 * shard,
    }
    for name, nbytes in moved.items():
        assert found[name].overlapped == pytest.approx(0.9 * nbytes / compute_s, rel=0.01), name
        assert found[name].apart == pytest.approx(10 * found[name].overlapped)
    assert found["drive writes"].overlapped > 12 * 0.9 * shard / compute_s  # master and moments, and more


def test_more_samples_need_less_and_the_size_hardly_matters():
    machine = load(hardware.MACHINE)
    few, many = (hardware.needs(SHAPE, samples, machine)["host memory"].overlapped for samples in (1, 16))
    assert few == pytest.approx(16 * many)
    wide = hardware.needs("4x2048x16", 1, machine)
    assert wide["host memory"].overlapped == pytest.approx(few, rel=0.01)
    assert wide["device to host"].overlapped < hardware.needs(SHAPE, 1, machine)["device to host"].overlapped


def test_the_paper_s_own_answers():
    rows = hardware.against_the_paper()
    assert "| 1.2 to 1.5 TB/s | 1.23 TB/s | 1.00 TB/s |" in rows[2]
    assert "| below 70 GB/s | 68.4 GB/s |" in rows[3]
    assert "| below 2 GB/s | 1.42 GB/s |" in rows[4]
