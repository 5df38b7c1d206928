"""Techniques that are switched off change how a step runs and not what it computes, and the page shows what was measured."""

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from bench.ablation import measure
from bench.ablation_cases import SIZES, Training
from bench.ablation_page import largest_hidden, largest_params, table, write
from bench.engines.unwall import _fill
from bench.shapes import SHAPES
from bench.switches import SWITCHES
from bench.workload import ADAMW, batch_of, build
from ranks import RankPool

import unwall
from bench import owner
from unwall.shards.group import Group
from unwall.tiers.links import Links

HOST = {"params": "host", "optimizer": "host", "device_bytes": "512KiB", "host_bytes": "1GiB", "activations": "keep"}
STEPS = 11  # eight that clip nothing, then two with updates ahead of the step


class Watched:
    """What was fetched while something else was in use, and copies that were not waited for."""

    def __init__(self, monkeypatch, model):
        self.ahead = self.unfinished = 0
        executor, begin, copy = unwall.api.engine(model).executor, Group.begin_gather, Links.copy

        def begin_gather(group):
            self.ahead += executor.pins.current != group.index
            begin(group)

        def copied(links, *args):
            ticket = copy(links, *args)
            self.unfinished += not ticket.done()
            return ticket

        monkeypatch.setattr(Group, "begin_gather", begin_gather)
        monkeypatch.setattr(Links, "copy", copied)


def trained(monkeypatch, plan, switch=None):
    with (SWITCHES[switch] if switch else nullcontext)(), monkeypatch.context() as patches:
        model = build(SHAPES["tiny"], "meta")
        unwall.shard(model, unwall.Plan(**plan))
        _fill(model)
        optimizer = unwall.AdamW(model.parameters(), max_grad_norm=1000.0, **ADAMW)
        seen = Watched(patches, model)
        data = batch_of(SHAPES["tiny"], 1, 16, torch.device("cpu"), 0)
        for _ in range(STEPS):
            model(*data).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = unwall.stats(model)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        held = stats.tiers["host"].live_bytes
        unwall.api.engine(model).finish()
    return values, seen, stats.speculated.committed, held


def same(found, expected):
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_switches_change_no_bit_and_do_what_they_say(monkeypatch, tmp_path):
    expected, seen, ahead, held = trained(monkeypatch, HOST)
    assert seen.ahead > 0
    assert ahead > 0
    for switch in ("prefetch off", "look-ahead 1", "overlap off", "speculation off"):
        values, seen, ahead, _ = trained(monkeypatch, HOST, switch)
        assert same(values, expected), switch
        assert (seen.ahead > 0) == (switch != "prefetch off"), switch
        assert (ahead > 0) == (switch not in ("overlap off", "speculation off")), switch
        assert switch != "overlap off" or seen.unfinished == 0
    disk = HOST | {"params": "disk", "optimizer": "disk", "disk": tmp_path, "host_bytes": "16MiB"}
    values, seen, _, _ = trained(monkeypatch, disk, "overlap off")
    assert same(values, expected)
    assert seen.unfinished == 0
    values, _, _, more = trained(monkeypatch, HOST, "split master off")
    for name, value in expected.items():  # but for ties, which it rounds otherwise; eleven updates come to 1e-3
        assert (values[name] - value).abs().mean() < 1e-5, name
    assert more > held


def test_the_rows_of_a_process_and_their_page(tmp_path):
    training = dataclasses.replace(SIZES["tiny"]()["host"].trainings[0], rows=("all on", "prefetch off"), warm=1)
    rows = measure(training, 1, 1, tmp_path)
    assert [row["row"] for row in rows] == ["all on", "prefetch off"]
    result = {"format": 1, "size": "tiny", "torch": "2", "command": "python -m bench.ablation", "parts": {}}
    result["machine"] = {"processor": "a core", "cores": 2, "host_bytes": 1 << 33, "devices": [], "date": "2026-01-01"}
    result["parts"]["host"] = {"title": "Host", "rows": [row | {"process": 0} for row in rows]}
    result["parts"]["disk"] = {"title": "Disk", "rows": [{"row": "all on", "error": "no | disk"}]}
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    write(tmp_path / "page.md", [file])
    text = (tmp_path / "page.md").read_text()
    assert "| prefetch off | " in text
    assert "| all on | no   disk |" in text
    assert "A huge layer" not in text  # which was not measured
    assert "largest" in json.loads(file.read_text())["parts"]["host"]["rows"][0]


def test_ratios_are_against_the_first_row_of_the_same_batch():
    rows = [{"row": name, "batch": batch, "times_s": [seconds], "peak_bytes": {}} for name, batch, seconds in
            (("all on", 8, 2.0), ("overlap off", 8, 3.0), ("all on", 2, 1.0), ("overlap off", 2, 4.0))]  # fmt: skip
    assert [line.split(" | ")[3] for line in table(rows)[2:]] == ["1.00", "1.50", "1.00", "4.00"]


def test_the_largest_model_shrinks_without_the_technique():
    base = Training(shape="tiny", seq=16, plan=HOST | {"host_bytes": "8MiB"})
    with SWITCHES["split master off"]():
        whole = largest_params(base)
    assert 0.8 < whole / largest_params(base) < 0.95  # 16 bytes per parameter instead of 14
    assert largest_hidden(1, 1 << 19, 64) < largest_hidden(None, 1 << 19, 64)


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def test_an_owner_that_broadcasts_gives_the_same_bits(pool):
    for parts, owned in pool.run(owner.measure, "tiny", 1, 1):
        assert owned["losses"] == parts["losses"]
        assert owned["group_bytes"] == 2 * parts["group_bytes"]
        assert owned["received_bytes"] != parts["received_bytes"] > 0
