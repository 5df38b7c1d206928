"""Several optimizers of one model in a checkpoint: each finds its own states again."""

import re

import checkpoint_tools
import pytest
import torch
from checkpoint_tools import TIERS, Setup, begin, differing, everything
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.checkpoint.manifest import MANIFEST
from unwall.plans import Plan

HOST = {"params": "host", "optimizer": "host"}


def train(steps=0, first="adamw", plan=None):
    """An embedding and a head, each with an optimizer of its own, in one group."""
    torch.manual_seed(0)
    model = unwall.shard(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), plan or Plan(**HOST))
    makers = {
        "adamw": lambda params: unwall.AdamW(params, lr=1e-2),
        "sgd": lambda params: unwall.wrap(torch.optim.SGD(params, lr=1e-1, momentum=0.9)),
    }
    other = next(name for name in makers if name != first)
    both = makers[first](model[0].parameters()), makers[other](model[2].parameters())
    for number in range(steps):
        step(model, both, number)
    return model, both


def step(model, optimizers, number):
    torch.manual_seed(number)
    model(torch.randn(4, 8)).float().square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def values(model, optimizers):
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for param, entry in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{param}.{name}": torch.as_tensor(v) for name, v in entry.items() if name != "inner"}
    return found


@pytest.mark.parametrize("given", [list, lambda both: {"body": both[0], "head": both[1]}], ids=["list", "dict"])
def test_both_go_on_with_the_same_bits(tmp_path, given):
    model, both = train(steps=2)
    unwall.save(tmp_path, model, given(both), block=False).wait()
    for number in (2, 3):
        step(model, both, number)
    plan = Plan(params="disk", optimizer="disk", disk=tmp_path)
    for resumed, fresh in (train(), train(steps=1), train(plan=plan)):
        unwall.load(tmp_path, resumed, given(fresh))
        for number in (2, 3):
            step(resumed, fresh, number)
        assert differing(values(model, both), values(resumed, fresh)) == []


def test_two_optimizers_of_the_same_parameters_keep_their_own_states(tmp_path):
    torch.manual_seed(0)
    model = unwall.shard(nn.Linear(8, 4), Plan(**HOST))
    both = [unwall.AdamW(model.parameters(), lr=1e-2), unwall.AdamW(model.parameters(), lr=1e-3)]
    for optimizer in both:
        step(model, [optimizer], 0)
    expected = values(model, both)
    unwall.save(tmp_path, model, both)
    step(model, both[:1], 1)
    unwall.load(tmp_path, model, both)
    assert differing(expected, values(model, both)) == []


def test_what_does_not_fit_is_said_before_anything_changes(tmp_path):
    model, both = train(steps=1)
    path = unwall.save(tmp_path / "named", model, {"body": both[0], "head": both[1]})
    alone = unwall.save(tmp_path / "alone", model, both[0])
    without = unwall.save(tmp_path / "without", model)
    listed = unwall.save(tmp_path / "listed", model, both)
    step(model, both, 1)
    before = values(model, both)
    for where, given, message in (
        (path, both, r"has these optimizers in it: 'body' and 'head'; given: '0' and '1'. Give as many as were saved"),
        (path, both[0], r"'body' and 'head'; given: one, without a name"),
        (path, {"body": both[0]}, r"'body' and 'head'; given: 'body'"),
        (alone, both, r"in it: one, without a name; given: '0' and '1'"),
        (without, both, "has no optimizer in it"),
        (
            path,
            {"body": both[1], "head": both[0]},
            "of optimizer 'body' has the states of AdamW, the optimizer here is wrap:SGD",
        ),
        (listed, [both[1], both[0]], "of optimizer '0' has the states of AdamW"),
    ):
        with pytest.raises(unwall.CheckpointError, match=message):
            unwall.load(where, model, given)
    with pytest.raises(ValueError, match="AdamW is given twice"):
        unwall.save(tmp_path, model, [both[0], both[0]])
    with pytest.raises(TypeError, match="name is a string that is not empty, got 3"):
        unwall.save(tmp_path, model, {3: both[0]})
    with pytest.raises(TypeError, match="optimizer '1' is None"):
        unwall.save(tmp_path, model, [both[0], None])
    assert differing(before, values(model, both)) == []
    unwall.load(path, model)  # the weights alone


def test_one_optimizer_is_written_as_it_always_was(tmp_path):
    """So that an older unwall reads it; a list of one is the same."""
    model, both = train(steps=1)
    for given, version in ((both[0], 1), ([both[0]], 1), (both, 2)):
        path = unwall.save(tmp_path, model, given)
        assert f'"version":{version},' in (path / MANIFEST).read_text()
        assert ('"optimizers":' in (path / MANIFEST).read_text()) == (version == 2)
    unwall.load(tmp_path / "checkpoint-000001", model, both[:1])


def alike(path, how):
    """What each rank is told: rank 1 does not do as rank 0 does."""
    setup = Setup(blocks=2)
    model, optimizer = begin(setup, TIERS["host"], path)
    checkpoint_tools.step(model, optimizer, setup, 0)
    unwall.save(path / "saved", model, optimizer)
    other = rank_and_world()[0] == 1
    if how == "options" and other:
        optimizer.param_groups[0]["lr"] *= 2
    before = everything(model, optimizer)
    try:
        if how == "load":
            unwall.load(path / "saved", model, None if other else optimizer)
        else:
            unwall.save(path / "saved", model, None if how == "save" and other else optimizer)
    except unwall.CheckpointError as error:
        assert differing(before, everything(model, optimizer)) == []
        return str(error), len(list((path / "saved").glob("checkpoint-*")))
    return "nothing", 0


ALIKE = {
    "options": r"rank 1 has the optimizer AdamW with .*, rank 0 AdamW with .*: all ranks need the same number of param groups",
    "save": "rank 1 has the optimizer none, rank 0 AdamW with",
    "load": "optimizers given to load: on rank 1 none, on rank 0 one. Give all ranks the same",
}


@pytest.mark.parametrize("how", list(ALIKE))
def test_all_ranks_give_the_same_optimizers(ranks, tmp_path, how):
    """Otherwise some ranks would go on with the moments, or the learning rate, of others."""
    for told, left in ranks(2).run(alike, tmp_path, how):
        assert re.search(ALIKE[how], told)
        assert left == 1
