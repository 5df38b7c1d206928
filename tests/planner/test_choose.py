"""Choosing a plan, and saying what would fit."""

import dataclasses
import re

import pytest
import torch
from planner_tools import MACHINE, decoder, job

import unwall
from unwall.planner import public
from unwall.planner.answer import answer
from unwall.planner.choose import choose
from unwall.planner.description import from_shape
from unwall.planner.hardware import load
from unwall.planner.outline import skeleton
from unwall.planner.public import plan as plan_for
from unwall.planner.report import to_dict
from unwall.plans import Plan, PlanError
from unwall.shards.build import Room, check_fit
from unwall.train import planning
from unwall.train.options import Options

MIB = 1 << 20


def machine(**changes):
    return dataclasses.replace(MACHINE, **changes)


def test_what_fits_stays_on_the_device():
    found = choose(decoder(), MACHINE, batch=8, seq=64)
    assert (found.params, found.optimizer) == ("device", "device")
    assert found.workload.activations == "keep"
    assert (found.workload.batch, found.workload.passes) == (8, 1)
    others = [lost.step_s for lost in found.runners_up if lost.step_s is not None]
    assert others
    assert found.prediction.step_s <= 1.01 * min(others)


def test_a_chosen_plan_is_a_plan():
    found = choose(decoder(), MACHINE)
    assert isinstance(found, Plan)
    assert type(found.to_plan()) is Plan
    budgets = {"device_bytes": found.device_bytes, "host_bytes": found.host_bytes}
    assert found.to_plan() == Plan(params="device", optimizer="device", activations="keep", **budgets)


@pytest.mark.parametrize("device_bytes", [1 << 30, 200 * MIB])
def test_a_chosen_plan_carries_the_budgets_it_was_judged_by(device_bytes):
    found = choose(decoder(width=512, layers=8, vocab=4096), machine(device_bytes=device_bytes), batch=2, seq=64)
    assert sum(found.prediction.terms["device"].values()) <= device_bytes
    assert found.prediction.peak_bytes["device"] <= found.device_bytes < device_bytes  # activations need some
    assert found.prediction.peak_bytes["host"] <= found.host_bytes
    assert found.passes == found.workload.passes


def test_a_small_device_spills_to_the_host_and_a_small_host_to_disk():
    outline = decoder(width=512, layers=8, vocab=4096)  # 29e6 parameters: 350 MB of states and gradients
    spilled = choose(outline, machine(device_bytes=200 * MIB), batch=1, seq=64)
    assert spilled.params == "auto"
    assert spilled.device_bytes
    assert spilled.prediction.terms["host"]
    assert not spilled.prediction.terms["disk"]
    tight = machine(device_bytes=200 * MIB, host_bytes=120 * MIB)
    drowned = choose(outline, tight, batch=1, seq=64, directory="/fast")
    assert drowned.disk == "/fast"
    assert drowned.prediction.terms["disk"]
    assert drowned.prediction.disk_days > 0


def test_activations_that_do_not_fit_are_recomputed_or_cut_into_passes():
    outline = decoder(width=256, layers=8)
    kept = choose(outline, machine(device_bytes=2 << 30), batch=64, seq=1024)
    assert kept.workload.activations == "keep"
    assert kept.workload.passes > 1
    assert any("passes" in line for line in kept.advice)
    tight = choose(outline, machine(device_bytes=150 * MIB), batch=64, seq=4096)
    assert tight.workload.activations == tight.activations  # the plan says so, and shard does it
    assert tight.kept.count("recompute") + tight.kept.count("host") > 0
    asked = choose(outline, machine(device_bytes=150 * MIB), batch=64, seq=4096, kept=("recompute",))
    assert asked.activations == "recompute"
    assert asked.prediction.step_s >= 0.99 * tight.prediction.step_s


def test_more_ranks_choose_a_stage():
    outline = skeleton(from_shape("24x2048"))  # 1.2e9
    box = machine(devices_per_node=8, device_bytes=80 << 30, host_bytes=1 << 40, collective_bytes_per_s=1e11)
    roomy = choose(outline, box, batch=64, seq=1024)
    assert roomy.stage in (0, 1, 2)
    tight = choose(outline, dataclasses.replace(box, device_bytes=8 << 30), batch=8, seq=1024)
    assert tight.stage == 3
    reasons = {lost.name: lost.reason for lost in tight.runners_up}
    assert "needs" in reasons["stage 0, everything on the device"]


@pytest.mark.parametrize("device_bytes", [1 << 30, 200 * MIB, 100 * MIB])
def test_what_cannot_win_need_not_be_simulated(device_bytes):
    """With ``compare`` everything that fits is; the plan is the same."""
    outline = decoder(width=512, layers=8, vocab=4096)
    arguments = {"batch": 2, "seq": 64, "directory": "/fast"}
    quick, whole = (choose(outline, machine(device_bytes=device_bytes), compare=each, **arguments) for each in (False, True))
    assert (quick, quick.name, quick.workload) == (whole, whole.name, whole.workload)
    assert quick.prediction.to_dict() == whole.prediction.to_dict()


def test_memory_as_the_objective():
    fast, small = (choose(decoder(), MACHINE, batch=8, seq=64, objective=what) for what in ("speed", "memory"))
    assert small.prediction.tier_bytes("device") < fast.prediction.tier_bytes("device")
    assert small.prediction.step_s >= fast.prediction.step_s


def test_budgets_are_kept():
    given = 4 * MIB
    found = choose(decoder(), MACHINE, batch=8, device_bytes=given)  # for states and activations together
    assert found.prediction.peak_bytes["device"] <= found.device_bytes <= given
    by_hand = choose(decoder(), MACHINE, batch=8, device_bytes=given, kept=("keep", "recompute"))
    assert by_hand.prediction.peak_bytes["device"] <= by_hand.device_bytes < given  # that is for states alone
    assert found.prediction.tier_bytes("device") <= given
    assert "of 4.0 MiB" in answer(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host_bytes": 200 * MIB}, ["of host memory per node", "ranks instead of 1", "a disk with"]),
        ({"device_bytes": MIB // 4}, ["devices with"]),
    ],
)
def test_when_nothing_fits_it_says_what_would(changes, words):
    outline = decoder(width=512, layers=8, vocab=4096)
    with pytest.raises(PlanError) as caught:
        choose(outline, machine(**{"device_bytes": 120 * MIB, **changes}), seq=64)
    for word in words:
        assert word in str(caught.value)
    assert "does not fit on box with 1 rank" in str(caught.value)


def test_what_is_said_to_fit_does():
    outline = decoder(width=512, layers=8, vocab=4096)
    small = machine(device_bytes=120 * MIB, host_bytes=200 * MIB)
    with pytest.raises(PlanError, match=r"4 ranks instead of 1"):
        choose(outline, small, seq=64)
    many = dataclasses.replace(small, nodes=4, network_bytes_per_s=1e10)
    assert choose(outline, many, seq=64).stage == 3


def test_budgets_that_are_all_too_small_are_named_together():
    outline, small = decoder(width=512, layers=8, vocab=4096), {"device_bytes": MIB, "host_bytes": 50 * MIB}
    given = {"hardware": machine(disk_bytes=0), "seq": 64}
    with pytest.raises(PlanError, match=r"device_bytes='[^']+' \(it is 1\.0 MiB\) with host_bytes='[^']+' \(it is") as refusal:
        plan_for(outline, **given, **small)
    named = dict(re.findall(r"(\w+_bytes)='([^']+)'", str(refusal.value)))
    assert plan_for(outline, **given, **named)
    for name in small:  # neither was named for nothing
        with pytest.raises(PlanError):
            plan_for(outline, **given, **named | {name: small[name]})


def test_long_samples_that_leave_no_room():
    with pytest.raises(PlanError, match=r"activations of one sample of 1048576 tokens.*samples of \d+ tokens instead"):
        choose(decoder(), machine(device_bytes=300 * MIB), seq=1 << 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch must be a whole number above 0, got 0"),
        ({"batch": -8}, "batch must be a whole number above 0, got -8"),
        ({"batch": 3, "ranks": 2}, "3 samples cannot be dealt out evenly to 2 ranks; 4 can"),
        ({"batch": 4, "ranks": 2}, "2 ranks, but box says nothing about what lies between them"),
        ({"seq": 0}, "seq must be a whole number above 0"),
        ({"objective": "beauty"}, "objective is speed or memory"),
        ({"device_bytes": -1}, "device_bytes must not be negative"),
        ({"device_bytes": "0"}, "device_bytes must be greater than zero"),
        ({"host_bytes": "lots"}, "host_bytes: cannot read 'lots'"),
        ({"device_bytes": 1}, r"does not fit on box.*device_bytes='[\d.]+MiB' \(it is 1 B\)"),
        ({"compute_dtype": torch.float16}, "has no matmul rate for float16"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_for(decoder(), hardware=MACHINE, **arguments)


def test_printing_shows_bytes_and_the_step():
    text = str(choose(decoder(), MACHINE, batch=8, seq=64))
    for word in ("moments", "device", "predicted step", "tokens/s", "lower bound", "those that lost", "unwall.Plan(stage=3"):
        assert word in text
    assert "\x1b" not in text


def test_as_json():
    import json

    found = json.loads(json.dumps(to_dict(choose(decoder(), load("pc-4090"), batch=4))))
    assert found["machine"] == "4090 PC"
    assert found["prediction"]["terms_bytes"]["device"]["moments"] > 0
    assert found["prediction"]["step_s"] > 0
    assert found["plan"]["stage"] == 3


def test_the_engine_takes_the_plan():
    from planner_tools import Decoder

    model = Decoder()
    found = plan_for(model, hardware=MACHINE, batch=2, seq=16, device_bytes="2MiB")
    unwall.shard(model, found)
    optimizer = unwall.AdamW(model.parameters())
    model(torch.zeros(2, 16, dtype=torch.long)).float().sum().backward()
    optimizer.step()
    assert unwall.stats(model).tiers["device"].peak_bytes <= 2 << 20


def test_the_public_function_and_the_module_of_the_same_name():
    from unwall.plans import Plan as Again

    assert Again is unwall.Plan
    found = unwall.plan("4x256", hardware=MACHINE, batch=2, seq=64)
    assert isinstance(found, unwall.Plan)
    assert found.prediction.step_s > 0


def test_ranks_on_a_machine_without_an_accelerator_share_it(monkeypatch):
    here = machine(is_host=True, host_cores=4)
    monkeypatch.setattr(public, "probe", lambda **given: here)
    found = plan_for(decoder(), ranks=4, batch=4, seq=64)
    assert found.ranks == 4
    assert found.prediction.step_s > plan_for(decoder(), ranks=1, batch=1, seq=64).prediction.step_s
    monkeypatch.setattr(public, "probe", lambda **given: MACHINE)
    with pytest.raises(PlanError, match="4 ranks, but this machine has 1 device: describe"):
        plan_for(decoder(), ranks=4, batch=4)


def test_passes_that_a_run_was_asked_for_are_planned_for(tmp_path, monkeypatch):
    """Their sums take room, so what holds one pass need not hold them."""
    outline, box = decoder(width=512, layers=12, vocab=1024), machine(host_bytes=8 << 30, disk_bytes=0)
    monkeypatch.setattr(planning, "machine_of", lambda *_: (box, 1))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "data.txt").write_text("words")
    paths = {"model": str(tmp_path / "config.json"), "tokenizer": str(tmp_path), "data": (str(tmp_path / "data.txt"),)}
    names = set()
    for budget in (560, 600, 640):
        given = Options(**paths, out="out", batch=2, seq=64, accumulate=2, device_bytes=f"{budget}MiB")
        decision = planning.decide(given, outline)
        plan = decision.plan
        assert plan.passes == 2
        held = job(plan, outline=outline, host=plan.budget_host_bytes, passes=2)
        check_fit(held.sizes, held.homes, plan, 1, Room(host_bytes=plan.budget_host_bytes))
        names.add(decision.chosen.name)
    assert len(names) == 2  # the largest budget holds all of it
    with pytest.raises(PlanError, match="least_passes is a divisor of the 4 samples of a rank, got 3"):
        choose(outline, box, batch=4, least_passes=3)
