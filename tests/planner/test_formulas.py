"""The formulas, and the bound of a step. tests/bench/test_paper.py has them against every published number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unwall.planner import formulas
from unwall.planner.formulas import Ceilings, StepWork, lower_bound


@given(st.floats(0.01, 0.99), st.floats(1, 1e6), st.floats(1e12, 1e15))
def test_bandwidth_is_the_inverse_of_efficiency(share, intensity, flops_per_s):
    rate = formulas.bandwidth_for(share, intensity, flops_per_s)
    assert formulas.efficiency(intensity, rate, flops_per_s) == pytest.approx(share)


def test_communication_volume():
    assert [formulas.zero_volume_params(7.5e9, stage) for stage in range(4)] == [15e9, 15e9, 15e9, 22.5e9]


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_zero_states(params, ranks):
    by_stage = [formulas.zero_state_bytes(params, ranks, stage) for stage in range(4)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert by_stage == pytest.approx(
        [16 * params, 4 * params + 12 * params / ranks, 2 * params + 14 * params / ranks, 16 * params / ranks]
    )


def test_step_flops():
    assert formulas.step_flops(1e9, 2, 1024) == 8 * 2 * 1024 * 1e9
    assert formulas.step_flops(1e9, 2, 1024, recompute=False) == 6 * 2 * 1024 * 1e9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formulas.zero_state_bytes(1, 1, 4), "stage is 0, 1, 2 or 3, got 4"),
        (lambda: formulas.zero_state_bytes(-1, 1, 1), "params must not be negative, got -1"),
        (lambda: formulas.zero_state_bytes(1, 0, 1), "ranks must be greater than zero, got 0"),
        (lambda: formulas.checkpoint_bytes(1, 1, 1, 1, 0), "every must be greater than zero"),
        (lambda: formulas.efficiency(1, float("nan"), 1), "bytes_per_s must not be negative, got nan"),
        (lambda: formulas.bandwidth_for(1, 1, 1), "at least 0 and below 1, got 1"),
        (lambda: StepWork(flops=-1), "flops must not be negative"),
        (lambda: Ceilings(flops_per_s=-1), "flops_per_s must not be negative"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_lower_bound_of_a_step_on_the_reference_machine():
    # One H200: 3.5e9 parameters on the host, gathered twice, gradients once; 8 samples of 2048 tokens, recomputed.
    params = 3.5e9
    work = StepWork(
        flops=formulas.step_flops(params, 8, 2048),
        host_to_device_bytes=2 * 2 * params,
        device_to_host_bytes=2 * params,
        host_memory_bytes=formulas.SPLIT_UPDATE_TRAFFIC_BYTES * params,
    )
    ceilings = Ceilings(
        flops_per_s=785e12, host_to_device_bytes_per_s=55e9, device_to_host_bytes_per_s=55e9, host_link_bytes_per_s=94e9,
        host_memory_bytes_per_s=130e9,
    )  # fmt: skip
    bound = lower_bound(work, ceilings)
    assert bound.limit == "host memory"
    assert bound.step_s == pytest.approx(0.70)
    assert bound.seconds["host to device"] == pytest.approx(14 / 55)
    assert bound.seconds["host link, both ways"] == pytest.approx(21 / 94)
    assert bound.seconds["compute"] == pytest.approx(0.584, abs=1e-3)
    assert "disk, reads and writes" not in bound.seconds  # no such limit was given
    assert bound.seconds["disk reads"] == 0


def test_lower_bound_when_reads_and_writes_share_a_disk():
    work = StepWork(disk_read_bytes=12e9, disk_write_bytes=12e9)
    apart = Ceilings(flops_per_s=1, disk_read_bytes_per_s=3e9, disk_write_bytes_per_s=2.2e9)
    shared = Ceilings(flops_per_s=1, disk_read_bytes_per_s=3e9, disk_write_bytes_per_s=2.2e9, disk_bytes_per_s=2.7e9)
    assert (lower_bound(work, apart).limit, lower_bound(work, shared).limit) == ("disk writes", "disk, reads and writes")
    assert lower_bound(work, shared).step_s == pytest.approx(24 / 2.7)


def test_lower_bound_refuses_what_the_machine_lacks():
    with pytest.raises(ValueError, match=r"disk reads: the step needs 1e\+09 of it, but the machine has none"):
        lower_bound(StepWork(disk_read_bytes=1e9), Ceilings(flops_per_s=1e12))
