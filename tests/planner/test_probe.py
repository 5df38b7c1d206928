"""Measuring this machine."""

import json
import os

import pytest
import torch

from unwall.planner import measure, probe
from unwall.planner.hardware import Hardware

RATES = {
    "copies": lambda device: (10e9, 9e9, 15e9), "update_rate": lambda threads: 20e9,
    "matmul_rate": lambda dtype, device: None if dtype is torch.float16 else 1e11,
    "block_rate": lambda dtype, device: (5e10, 1e-10), "collective_rate": lambda device: 0.0,
    "disk_rates": lambda directory: (2e9, 1e9, 2.5e9),
}  # fmt: skip


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Fast measurements that count their calls, and a cache of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[str] = []
    for name, rate in RATES.items():
        monkeypatch.setattr(measure, name, lambda *given, name=name, rate=rate: calls.append(name) or rate(*given))
    return calls


def test_is_measured_once_and_remembered(counted):
    first = probe.probe()
    count = len(counted)
    assert probe.probe() == first
    assert len(counted) == count
    probe.probe(refresh=True)
    assert len(counted) == 2 * count
    assert isinstance(first, Hardware)
    assert set(first.matmul_flops_per_s) == {"float32", "bfloat16"}
    assert first.disk_bytes == 0


def test_only_what_is_computed_in_is_measured(counted):
    first = probe.probe(dtypes=[torch.bfloat16])
    assert set(first.matmul_flops_per_s) == set(first.block_flops_per_s) == {"bfloat16"}
    assert counted.count("block_rate") == 1
    counted.clear()
    both = probe.probe(dtypes=[torch.float32, torch.bfloat16])
    assert set(both.matmul_flops_per_s) == set(both.block_flops_per_s) == {"float32", "bfloat16"}
    assert counted == ["matmul_rate", "block_rate"]
    counted.clear()
    assert probe.probe() == probe.probe() == probe.probe(dtypes=[torch.bfloat16]) == both
    assert counted == ["matmul_rate"]  # of fp16, in which it does not compute


def test_where_it_does_not_compute_in_what_is_asked_for_the_others_are_measured(counted):
    found = probe.probe(dtypes=[torch.float16])
    assert set(found.matmul_flops_per_s) == {"float32", "bfloat16"}
    counted.clear()
    assert probe.probe() == found
    assert counted == []


def test_the_disk_is_measured_when_it_is_asked_for(counted, tmp_path):
    probe.probe()
    counted.clear()
    found = probe.probe(disk=tmp_path)
    assert counted == ["disk_rates"]
    assert (found.disk_read_bytes_per_s, found.disk_write_bytes_per_s, found.disk_both_bytes_per_s) == (2e9, 1e9, 2.5e9)
    counted.clear()
    assert probe.probe(disk=tmp_path) == probe.probe() == found
    assert counted == []


def test_collectives_are_measured_once_there_are_ranks(counted, monkeypatch):
    probe.probe()
    counted.clear()
    monkeypatch.setattr(probe.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(probe.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(measure, "collective_rate", lambda device: counted.append("collective_rate") or 3e9)
    assert probe.probe().collective_bytes_per_s == probe.probe().collective_bytes_per_s == 3e9
    assert counted == ["collective_rate"]


def test_another_machine_has_another_file(counted, monkeypatch):
    here = probe.cache_file()
    probe.probe()
    assert json.loads(here.read_text())["fingerprint"] == probe.fingerprint()
    monkeypatch.setattr(probe, "_processor", lambda: "another")
    assert probe.cache_file() != here


@pytest.mark.parametrize("content", ["", "{", "[]", '{"hardware": 3}', '{"hardware": {"name": "x"}}'])
def test_a_broken_file_is_measured_again(counted, content):
    probe.cache_file().parent.mkdir(parents=True)
    probe.cache_file().write_text(content)
    assert probe.probe().host_memory_bytes_per_s == 20e9


def test_progress_is_told(counted, tmp_path):
    told: list[tuple[str, int, int]] = []
    probe.probe(disk=tmp_path, progress=lambda *row: told.append(row))
    assert told[-1][0] == "done"
    assert [row[1] for row in told] == list(range(len(told)))
    assert {row[2] for row in told} == {len(told) - 1}


def test_a_directory_that_is_none(counted, tmp_path):
    with pytest.raises(probe.ProbeError, match="is not a directory"):
        probe.probe(disk=tmp_path / "missing")


def test_a_directory_that_cannot_be_written(counted, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *given: False)  # root may write everywhere
    with pytest.raises(probe.ProbeError, match="cannot be written: the probe needs"):
        probe.probe(disk=tmp_path)


def test_a_disk_that_fails(counted, tmp_path, monkeypatch):
    def broken(directory):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(measure, "disk_rates", broken)
    with pytest.raises(probe.ProbeError, match=r"cannot be measured: .*Input/output error"):
        probe.probe(disk=tmp_path)


def test_a_cache_that_cannot_be_written_is_no_error(counted, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert probe.probe().host_memory_bytes_per_s == 20e9


def test_real_measurements(monkeypatch, tmp_path):
    """Small ones: the numbers are plausible, and nothing is left behind."""
    for name in ("COPY_BYTES", "DISK_BYTES"):
        monkeypatch.setattr(measure, name, 8 << 20)
    monkeypatch.setattr(measure, "UPDATE_NUMEL", 1 << 18)
    monkeypatch.setattr(measure, "LIMIT_S", 0.05)
    cpu = torch.device("cpu")
    assert all(1e5 < rate < 1e13 for rate in measure.copies(cpu))
    assert 1e5 < measure.update_rate(2) < 1e13
    assert 1e5 < measure.matmul_rate(torch.float32, cpu) < 1e15
    flops, fixed = measure.block_rate(torch.float32, cpu)
    assert 1e5 < flops < 1e15
    assert 0 <= fixed < 1e-3
    assert all(1e4 < rate < 1e13 for rate in measure.disk_rates(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert measure.collective_rate(cpu) == 0.0
