"""The scripts of habit_scripts*.py on every tier, in fp32 and bf16, on one and two ranks.

In fp32 they give what plain PyTorch gives; in bf16, where plain PyTorch has no master, the bits of everything on the device.
Two ranks see the same batches, so their average is that of one.
"""

import warnings
from tempfile import TemporaryDirectory

import habit_scripts
import habit_scripts_of_loops
import habit_scripts_of_modules
import pytest
import torch

import unwall
from unwall.plans import Plan

SCRIPTS = habit_scripts.SCRIPTS | habit_scripts_of_modules.SCRIPTS | habit_scripts_of_loops.SCRIPTS
TIERS = {"device": {}, "host": {"params": "host", "optimizer": "host"}, "disk": {"params": "disk", "optimizer": "disk"}}
FEW = ("sam", "distill", "soft_target", "freezes_and_thaws", "in_place", "parametrizes", "best_state", "ema_state_dict")
ALONE = ("loads_data",)
"""Ranks of tests have no children."""
ONLY_IN_FP32 = ("constrained",)
"""Their buffers are fp32, and torch has no such products with bf16."""


class Plain:
    """What scripts make models and optimizers with."""

    def model(self, model):
        return model

    def sgd(self, params, **options):
        return torch.optim.SGD(params, **options)

    def adam(self, params, **options):
        return torch.optim.AdamW(params, eps=1e-3, **options)


class Sharded(Plain):
    def __init__(self, tier, dtype, folder):
        self.plan = Plan(compute_dtype=dtype, disk=folder, **TIERS[tier])

    def model(self, model):
        return unwall.shard(model, self.plan)

    def sgd(self, params, **options):
        return unwall.wrap(super().sgd(params, **options))

    def adam(self, params, **options):
        return unwall.AdamW(params, eps=1e-3, **options)


def run(names, tier=None, dtype=torch.float32):
    """What each script gives, or what it raised."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that are kept over a step
            kit = Plain() if tier is None else Sharded(tier, dtype, folder)
            try:
                found[name] = [value.detach().clone() for value in SCRIPTS[name](kit)]
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def differing(expected, found, bound):
    wrong = {name: got for name, got in found.items() if isinstance(got, str)}
    for name in found.keys() - wrong.keys():
        far = [float((one - other).abs().max()) for one, other in zip(expected[name], found[name], strict=True)]
        wrong |= {name: far} if not max(far) <= bound else {}
    return wrong


def test_scripts_give_what_they_give_plainly():
    assert differing(run(FEW), run(FEW, "host"), bound=3e-5) == {}


def test_an_average_over_state_dicts_on_two_ranks(ranks):
    """Rank 0 alone has it, and ``load_state_dict`` on both takes it from there."""
    expected = run(["ema_state_dict"])
    for found in ranks(2).run(run, ["ema_state_dict"], "host"):
        assert differing(expected, found, bound=3e-5) == {}


@pytest.mark.drill
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tier", TIERS)
def test_every_script_on_every_tier(ranks, world, tier):
    names = [name for name in SCRIPTS if world == 1 or name not in ALONE]
    expected = run(names)
    for found in ranks(world).run(run, names, tier):
        assert differing(expected, found, bound=3e-5) == {}


@pytest.mark.drill
def test_every_script_in_bf16_gives_the_same_everywhere(ranks):
    names = [name for name in SCRIPTS if name not in (*ALONE, *ONLY_IN_FP32)]
    expected = run(names, "device", torch.bfloat16)
    assert [found for found in expected.values() if isinstance(found, str)] == []
    for world, tier in [(1, "host"), (1, "disk"), (2, "device"), (2, "host"), (2, "disk")]:
        for found in ranks(world).run(run, names, tier, torch.bfloat16):
            assert differing(expected, found, bound=0.0) == {}, (world, tier)
