"""Updates through the disk, one after the other: who waits for whose writes."""

import torch
from early_tools import DEVICE, outcome, wait_until
from torch import nn

import unwall
from unwall.plans import Plan


def trained(plan, between=lambda _: None):
    """Two steps; ``between``: called when the second one's updates are under way."""
    torch.manual_seed(0)
    small = [nn.Linear(64, 64, bias=False) for _ in range(6)]  # groups of two chunks
    model = nn.Sequential(*small, nn.Linear(64, 1024, bias=False), nn.Linear(1024, 64, bias=False))
    unwall.shard(model, Plan(**plan))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, speculate=False)
    for number in range(2):
        model(torch.full((4, 64), 0.5)).float().square().mean().backward()
        if number == 1 and (disk := unwall.api.engine(model).tiers.disk) is not None:
            unwall.stats(model)  # the first step's updates have ended
            disk.engine.throttle("write", 1.0)  # nothing is written from now on
        optimizer.step()
        optimizer.zero_grad()
    between(model)
    return outcome(model, optimizer)


def test_an_update_begins_while_the_one_before_it_is_written_and_a_fetch_waits_for_parameters_only(tmp_path):
    seen = []

    def between(model):
        engine = unwall.api.engine(model)
        first, second = engine.groups[:2]
        wait_until(lambda: not second.updating)
        assert first.pending.update is not None
        assert second.pending.update is not None
        with torch.no_grad():
            seen.append(model[0](torch.ones(2, 64)))
        assert not first.pending.update.done()
        assert not second.pending.update.done()
        engine.tiers.disk.engine.throttle("write", 0)

    expected = trained(DEVICE, lambda model: seen.append(model[0](torch.ones(2, 64)).detach()))
    got = trained({"params": "host", "optimizer": "disk", "disk": tmp_path}, between)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert torch.equal(*seen)


def note_reads(disk, asked):
    """Remembers what is read from now on."""
    inner = disk.read

    def read(block, *args, **kwargs):
        asked.append(block.label)
        return inner(block, *args, **kwargs)

    disk.read = read


def test_an_update_ahead_of_its_step_begins_while_the_one_before_it_is_written(tmp_path):
    """Nothing of the first one can be written, and yet the next ones read their states."""

    def trained_ahead(plan):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(10)])  # five groups of two chunks
        unwall.shard(model, Plan(**plan))
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        disk, asked = unwall.api.engine(model).tiers.disk, []
        for number in range(4):
            if number == 3 and disk is not None:
                unwall.stats(model)
                disk.engine.throttle("write", 1.0)
                note_reads(disk, asked)
            model(torch.full((4, 64), 0.5)).float().square().mean().backward()
            if number == 3 and disk is not None:
                wait_until(lambda: len({label.split()[-1] for label in asked}) >= 2)
                assert optimizer.ahead.ready == 0
                disk.engine.throttle("write", 0)
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, optimizer), unwall.stats(model).speculated

    expected, _ = trained_ahead(DEVICE)
    got, speculated = trained_ahead({"params": "host", "optimizer": "disk", "disk": tmp_path})
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
    assert speculated.committed >= 3


def test_what_was_frozen_at_shard_trains_on_disk_once_it_is_not(tmp_path):
    """Nothing was trained when the memory was taken that updates go through."""

    def thawed(plan):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]).requires_grad_(False)
        unwall.shard(model, Plan(**plan))
        model.requires_grad_(True)
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(torch.full((4, 64), 0.5)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return outcome(model, optimizer)

    expected, got = thawed(DEVICE), thawed({"params": "disk", "optimizer": "disk", "disk": tmp_path})
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []
