"""``unwall train`` where the device has no room for a step: it is taken all the same, with the same numbers."""

import pytest
import torch
from train_tools import losses, make_jsonl, make_model, make_plan, train_here

from unwall.train import again
from unwall.train.command import run
from unwall.train.errors import TrainError
from unwall.train.model import Trained
from unwall.train.options import Options

PATHS = ("model", "data", "out", "plan")


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, loss):
        return loss.clone()

    @staticmethod
    def backward(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a little")


@pytest.fixture
def options(tmp_path):
    make_model(tmp_path / "model")
    common = {"seq": 48, "batch": 4, "lr": 1e-2, "schedule": "constant", "warmup": 0, "steps": 4, "accumulate": 2}
    paths = {"model": tmp_path / "model", "data": make_jsonl(tmp_path / "data.jsonl"), "out": tmp_path / "out"}
    return paths | common | {"plan": make_plan(tmp_path / "plan.toml", "host")}


def fails_at(monkeypatch, calls):
    """In the loss of some calls, counted over all tries, and in the backward of others."""
    count, loss_of = [0], Trained.loss

    def loss(self, *args):
        found, where = loss_of(self, *args), calls.get(count[0])
        count[0] += 1
        torch.rand(3)  # as dropout does
        if where == "loss":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a little")
        return FailingBackward.apply(found) if where == "backward" else found

    monkeypatch.setattr(Trained, "loss", loss)
    return count


@pytest.mark.parametrize("adapters", [False, True])
def test_a_step_without_room_runs_again_with_the_same_numbers(adapters, options, tmp_path, monkeypatch, capsys):
    more = {"lora": True, "lora_rank": 2, "lora_dropout": 0.5} if adapters else {}
    with monkeypatch.context() as patch:
        fails_at(patch, {})
        train_here(**options | more)
    expected = losses(tmp_path / "out")
    count = fails_at(monkeypatch, {0: "loss", 1: "backward", 3: "backward", 6: "loss"})
    train_here(**options | more | {"out": tmp_path / "again"})
    assert losses(tmp_path / "again") == expected
    assert count[0] == 4 * 2 + 1 + 1 + 2 + 1  # two passes per step, and those of the tries that failed
    assert capsys.readouterr().out.count("unwall: CUDA out of memory; the step runs again") == 4


def test_a_step_that_never_fits_ends_the_run_with_what_would_help(options, monkeypatch):
    count = fails_at(monkeypatch, dict.fromkeys(range(100), "backward"))
    given = {name: (str(value),) if name == "data" else str(value) for name, value in options.items() if name in PATHS}
    with pytest.raises(TrainError, match=r"^CUDA out of memory: use more passes \(--accumulate\)"):
        run(Options(**options | given))
    assert count[0] == again.TRIES
