"""The time line of a run."""

import json

import torch
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan


def train(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.randn(8, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def build(**plan):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    unwall.shard(model, Plan(**plan))
    return model, unwall.AdamW(model.parameters())


def test_a_profile_shows_compute_links_updates_and_disk(tmp_path):
    model, optimizer = build(params="host", optimizer="disk", disk=tmp_path)
    train(model, optimizer)
    with unwall.profile(model) as profile:
        train(model, optimizer)
    lanes = {span.lane for span in profile.spans}
    assert {"compute", "host>device", "device>host", "update", "disk>host", "host>disk"} <= lanes
    groups = {group.name for group in unwall.api.engine(model).groups}
    assert {span.label for span in profile.spans if span.lane == "compute"} == groups
    assert all(span.start <= span.end for span in profile.spans)
    length = max(span.end for span in profile.spans) - min(span.start for span in profile.spans)
    assert all(0 < seconds <= length for seconds in profile.busy().values())
    profile.save_trace(tmp_path / "trace.json")
    profile.save_picture(tmp_path / "lanes.svg", "two steps")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(profile.spans)
    assert (tmp_path / "lanes.svg").read_text().count("<title>") == len(profile.spans)
    train(model, optimizer, 1)
    assert len(profile.spans) == sum(event["ph"] == "X" for event in events)  # nothing is recorded outside


def test_a_stall_is_named_after_the_group_that_was_waited_for(tmp_path):
    model, optimizer = build(params="disk", optimizer="disk", disk=tmp_path)
    train(model, optimizer)
    disk = unwall.api.engine(model).tiers.disk
    disk.engine.throttle("read", 64 << 10)  # an eighth of a second per group
    with unwall.profile(model) as profile, torch.no_grad():
        model(torch.randn(8, 64))
    disk.engine.throttle("read", 0)
    waited = [label for label, seconds in profile.stalls() if seconds > 0.01]
    assert waited
    assert all(any(group.name in label for group in unwall.api.engine(model).groups) for label in waited)


def collectives():
    rank, _ = rank_and_world()
    torch.manual_seed(rank)
    model, optimizer = build()
    with unwall.profile(model) as profile:
        train(model, optimizer, 1)
    stats = unwall.stats(model)
    return {span.label for span in profile.spans if span.lane == "collective"}, stats.links["collective"].busy_seconds > 0


def test_collectives_are_on_the_time_line(ranks):
    assert ranks(2).run(collectives) == [({"all-gather", "reduce-scatter"}, True)] * 2


def test_torch_profiler_shows_named_spans():
    model, optimizer = build(params="host", optimizer="host")
    train(model, optimizer)
    with torch.profiler.profile() as trace:
        train(model, optimizer, 1)
    names = {event.name for event in trace.events()}
    assert any(name.startswith("unwall host>device") for name in names)
    assert any(name.startswith("unwall device>host") for name in names)
