"""``print(unwall.stats(model))`` is a table a person reads; the numbers stay attributes."""

import gc
import weakref

import pytest
import torch
from torch import nn

import unwall
from unwall.runtime.counts import Speculated
from unwall.runtime.stats import CollectiveStats, Stats, TierStats
from unwall.tiers.meter import LinkStats

GIB = 2**30


def made_up(**changed):
    numbers = {
        "tiers": {"device": TierStats(9 * GIB, 10 * GIB, 12 * GIB), "disk": TierStats(0, 1536, None)},
        "links": {
            "host>device": LinkStats(
                moved_bytes=3 * GIB,
                copies=1200,
                busy_seconds=1.25,
                stall_seconds=0.6206,
                stalls={"block 1": 0.02, "block 2": 0.4, "block 3": 0.0001, "block 4": 0.2, "block 5": 0.0005},
            ),
            "host>disk": LinkStats(moved_bytes=4 * GIB, copies=8, busy_seconds=2000, stall_seconds=0, stalls={}),
        },
        "collectives": {"all_gather": CollectiveStats(1234567), "reduce_scatter": CollectiveStats(0)},
        "trace_mismatches": 2,
        "control_exchanges": 8,
        "skipped_steps": 0,
        "steps": 4,
        "speculated": Speculated(committed=31, missed=1),
        "_engine": None,
    }
    return Stats(**numbers | changed)


TABLE = """\
tier       live      peak    budget
device  9.0 GiB  10.0 GiB  12.0 GiB
disk        0 B   1.5 KiB      none

link                    moved  copies         busy  stalled
host>device           3.0 GiB   1,200      1.250 s  0.621 s
  waited for block 2                                0.400 s
  waited for block 4                                0.200 s
  waited for block 1                                0.020 s
host>disk             4.0 GiB       8  2,000.000 s  0.000 s

collective       elements
all_gather      1,234,567
reduce_scatter          0

since the last reset
optimizer steps                              4
written to disk per step               1.0 GiB
updates ahead of the step: used             31
updates ahead of the step: done again        1
trace mismatches                             2
control exchanges                            8"""


def test_the_table_of_made_up_numbers():
    assert str(made_up()) == TABLE
    assert repr(made_up()) == "<Stats: 4 steps; live: device 9.0 GiB, disk 0 B; print it for the table>"


def test_long_names_keep_their_end_and_the_width():
    stalls = {f"model.{'deep.' * 40}layer{number}.weight": 1.0 + number for number in range(5)}
    link = LinkStats(moved_bytes=1, copies=1, busy_seconds=0.0, stall_seconds=15.0, stalls=stalls)
    lines = str(made_up(links={"host>device": link})).splitlines()
    assert max(map(len, lines)) == 100
    waits = [line for line in lines if line.startswith("  waited for model.deep.")]
    assert [line.split(".weight ")[0][-6:] for line in waits] == ["layer4", "layer3", "layer2"]


def test_a_model_that_has_moved_nothing_shows_no_links():
    model = nn.Linear(4, 4)
    unwall.shard(model)
    assert "link" not in str(unwall.stats(model))
    assert "optimizer steps" in str(unwall.stats(model))


def test_the_table_of_a_real_model_shows_its_attributes(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    unwall.shard(model, unwall.Plan(params="host", optimizer="disk", disk=tmp_path, host_bytes="64MiB"))
    optimizer = unwall.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(2, 64)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = unwall.stats(model)
    shown = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in str(stats).splitlines() if line}
    assert shown["host"] == "64.0 MiB"
    assert shown["disk"] == "none"
    assert {"host>device", "device>host", "host>disk", "disk>host", "update"} <= set(shown)
    assert shown["optimizer steps"] == "2" == str(stats.steps)
    assert stats.links["host>disk"].moved_bytes == 2 * stats.disk_bytes_per_step > 0
    assert shown["written to disk per step"] != "0 B"


def test_a_snapshot_does_not_keep_the_model():
    model = unwall.shard(nn.Linear(4, 4), unwall.Plan(compute_dtype=torch.float32))
    gone, stats = weakref.ref(model), unwall.stats(model)
    del model
    gc.collect()
    assert gone() is None
    assert stats.steps == 0
    with pytest.raises(RuntimeError, match="model is gone"):
        stats.reset()
