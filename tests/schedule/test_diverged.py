"""Ranks that do not run the same loop: a DivergedError on every rank, at once, that says where each of them is.

Each way to diverge is tried early, while the ranks negotiate, and late, when they follow a script.
"""

import os
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import NestedNet
from ranks import rank_and_world
from reference import seeded, shard_tight, unwall_adamw, vectors

import unwall
from unwall.plans import Plan
from unwall.shards.control import Control, DivergedError

FP32 = Plan(compute_dtype=torch.float32)
LIMIT_S = 400
"""Far below the half an hour after which a rank gives up on another one."""


class Loop:
    """A training loop, and what one rank does differently in one iteration."""

    def __init__(self, tight):
        self.model = seeded(NestedNet)
        shard_tight(self.model) if tight else unwall.shard(self.model, FP32)
        self.other = None
        self.optimizer = unwall_adamw(self.model)

    def forward(self):
        inputs, target = vectors()
        return (self.model(inputs) - target).square().mean()

    def iteration(self):
        self.forward().backward()
        self.optimizer.step()

    def diverge(self, how):
        match how:
            case "skips a step":
                self.forward().backward()
            case "skips a backward":
                self.forward()
                self.optimizer.step()
            case "steps twice":
                self.iteration()
                self.optimizer.step()
            case "an extra forward":
                loss = self.forward()
                self.forward()
                loss.backward()
                self.optimizer.step()
            case "an extra evaluation":
                with torch.no_grad():
                    self.forward()
                self.iteration()
            case "an extra backward":
                self.forward().backward()
                self.iteration()
            case "state_dict":
                self.model.state_dict()
                self.iteration()
            case "state_dict of the optimizer":
                self.optimizer.state_dict()
                self.iteration()
            case "load_state_dict":
                shapes = {name: param.shape for name, param in self.model.named_parameters()}
                self.model.load_state_dict({name: torch.zeros(shape) for name, shape in shapes.items()}, strict=False)
                self.iteration()
            case "full_params":
                self.forward().backward()
                with unwall.full_params(self.model):
                    pass
                self.optimizer.step()
            case "clips":
                self.forward().backward()
                self.optimizer.clip_grad_norm_(1.0)
                self.optimizer.step()
            case "skips an iteration":
                pass


WAYS = [
    "skips a step",
    "skips a backward",
    "steps twice",
    "an extra forward",
    "an extra evaluation",
    "an extra backward",
    "state_dict",
    "state_dict of the optimizer",
    "load_state_dict",
    "full_params",
    "clips",
    "skips an iteration",
]


def diverge(how, when, tight, different):
    """What this rank was told, if one of the ranks diverges in iteration ``when``."""
    rank, _ = rank_and_world()
    loop = Loop(tight)
    for number in range(when + 3):
        try:
            loop.diverge(how) if (number, rank) == (when, different) else loop.iteration()
            if number == when + 2:
                loop.model.state_dict()  # where the loop ends with different numbers of iterations
        except DivergedError as error:
            return str(error)
    return None


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("when", "tight"), [(0, False), (6, False), (6, True)], ids=["negotiating", "by script", "streaming"])
def test_every_rank_is_told(ranks, how, when, tight):
    messages = ranks(2).run(diverge, how, when, tight, 1, limit_s=LIMIT_S)
    assert all(messages), messages
    assert messages[0] == messages[1]
    assert "rank 0 is at " in messages[0]
    assert "rank 1 is at " in messages[0]
    assert "All ranks must run the same forwards" in messages[0]


@pytest.mark.parametrize("how", ["skips a step", "an extra forward", "state_dict"])
def test_four_ranks_are_told_whichever_diverges(ranks, how):
    for different in (0, 2):
        messages = ranks(4).run(diverge, how, 6, False, different, limit_s=LIMIT_S)
        assert all(messages), messages
        assert len(set(messages)) == 1


def test_the_message_says_what_each_rank_has_called(ranks):
    for message in ranks(2).run(diverge, "state_dict", 6, False, 1):
        # In its forward, wherever it was when it heard of the other one.
        assert re.search(r"rank 0 is at [^(]*\(forward 7, after 6 backwards, 6 steps\)", message), message
        assert "rank 1 is at state_dict (forward 6, after 6 backwards, 6 steps)" in message


def run_different_models():
    """Two models over the same ranks, and each rank runs another one."""
    rank, _ = rank_and_world()
    loops = [Loop(tight=False), Loop(tight=False)]
    for _ in range(6):
        for loop in loops:
            loop.iteration()
    try:
        loops[rank].iteration()
    except DivergedError as error:
        return str(error)


def test_ranks_that_run_different_models(ranks):
    first, second = ranks(2).run(run_different_models, limit_s=LIMIT_S)
    assert "rank 1 is at another sharded model" in first
    assert "rank 0 is at another sharded model" in second


def stop_early(rank, folder, told):
    """Rank 1 ends in the middle of training, as after an error of its own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    loop = Loop(tight=False)
    for number in range(8):
        if (rank, number) == (1, 6):
            return
        try:
            loop.iteration()
        except DivergedError as error:
            told.put(str(error))
            return


def test_a_rank_that_ends(tmp_path):
    context = mp.get_context("spawn")
    told = context.SimpleQueue()
    processes = [context.Process(target=stop_early, args=(rank, str(tmp_path), told)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=LIMIT_S)
        assert not process.is_alive(), process.kill()
    assert not told.empty(), "rank 0 was not told"
    assert "another rank" in told.get()


def train_with_slow_words(delay_s):
    """Training in which each exchange takes longer gives the same values."""
    exchange = Control.exchange

    def late(control, *args):
        time.sleep(delay_s * (control.rank + 1))
        return exchange(control, *args)

    Control.exchange = late
    try:
        torch.manual_seed(0)
        loop = Loop(tight=True)
        for _ in range(5):
            loop.iteration()
        return loop.model.state_dict()
    finally:
        Control.exchange = exchange


def test_ranks_that_are_late_are_not_diverged(ranks):
    expected = ranks(2).run(train_with_slow_words, 0.0)[0]
    got = ranks(2).run(train_with_slow_words, 0.003)[0]
    assert all(torch.equal(value, got[name]) for name, value in expected.items())
