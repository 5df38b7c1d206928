"""``unwall train``: the same losses on every tier, with one rank or two, with a stop or without; and a result that loads."""

import json
import math
import os
import shutil
import signal

import pytest
import torch
from train_tools import losses, make_jsonl, make_model, make_plan, read_log, train_here
from typer.testing import CliRunner

from unwall.cli import app
from unwall.train import loop
from unwall.train.errors import TrainError
from unwall.train.model import empty_model, read_config
from unwall.train.options import Options
from unwall.train.start import PARTS

TIERS = ("device", "host", "disk")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models, data and plans."""
    root = tmp_path_factory.mktemp("train")
    for kind in ("llama", "qwen3_moe"):
        make_model(root / kind, kind)
    make_jsonl(root / "data.jsonl")
    for tier in TIERS:
        make_plan(root / f"{tier}.toml", tier, root / "disk")
    return root


def options(place, out, tier="host", kind="llama", **more):
    common = {"seq": 48, "batch": 4, "lr": 1e-2, "schedule": "constant", "warmup": 0, "steps": 8}
    paths = {"model": place / kind, "data": place / "data.jsonl", "out": place / out, "plan": place / f"{tier}.toml"}
    return paths | common | more


@pytest.fixture(scope="module")
def undisturbed(place):
    """Losses of eight steps, by model."""
    found = {}
    for kind in ("llama", "qwen3_moe"):
        train_here(**options(place, f"whole-{kind}", "device", kind, eval_data=place / "data.jsonl", eval_every=4))
        found[kind] = losses(place / f"whole-{kind}")
    return found


def test_the_log_says_where_the_time_until_the_first_step_went(place, undisturbed):
    [start] = read_log(place / "whole-llama", "start")
    assert set(PARTS) - {"checkpoint", "counting"} == set(start["parts"])
    assert start["step"] == 0
    assert abs(sum(start["parts"].values()) - start["seconds"]) < 0.1


def test_losses_are_those_of_a_plain_loop(place, undisturbed):
    """transformers and torch.optim, over the same sequences."""
    import transformers

    from unwall.train.batches import Packer, my_lanes
    from unwall.train.data import open_data
    from unwall.train.packing import to_tensors
    from unwall.train.tokens import Encoder

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "llama")
    data = open_data([place / "data.jsonl"], place / "whole-llama" / "index", Encoder(tokenizer), True)
    packer = Packer(data, data.order(0), my_lanes(4, 0, 1, None, None), 48, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for _ in range(8):
        batch = packer.step()
        loss = model(**to_tensors(batch.sequences, torch.device("cpu")), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert undisturbed["llama"] == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_tiers_and_a_stop_change_nothing(place, undisturbed, tier):
    """Four steps, then the same command up to the eighth."""
    out = f"resumed-{tier}"
    train_here(**options(place, out, tier, steps=4))
    train_here(**options(place, out, tier, steps=8))
    assert losses(place / out) == pytest.approx(undisturbed["llama"], rel=1e-5)
    said = json.loads((place / out / "run.json").read_text())
    assert said["status"] == "finished"
    assert said["steps"] == 8
    assert said["prediction"]["step_s"] > 0


def test_a_run_without_checkpoints_says_that_it_begins_again(place, capsys):
    train_here(**options(place, "unsaved", steps=1, save_every=0))
    assert "begins again" not in capsys.readouterr().out
    train_here(**options(place, "unsaved", steps=2, save_every=0))
    assert "holds no checkpoint of what was done before: begins again with step 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_goes_on_with_another_weight_decay(place, capsys, lora):
    found = {}
    for begin, then in ((0.0, 0.0), (0.0, 0.9), (0.9, 0.9)):
        given = options(place, f"decay-{lora}-{begin}-{then}", "device", lora=lora)
        train_here(**given | {"steps": 4, "weight_decay": begin})
        train_here(**given | {"steps": 8, "weight_decay": then})
        found[begin, then] = losses(given["out"])
    assert "goes on with --weight-decay 0.9 (was 0.0)" in capsys.readouterr().out
    assert found[0.0, 0.9][:5] == found[0.0, 0.0][:5]
    assert found[0.0, 0.9][5:] != found[0.0, 0.0][5:]
    assert found[0.0, 0.9] != found[0.9, 0.9]


def test_a_run_goes_on_with_its_paths_written_otherwise(place, capsys, monkeypatch):
    given = {"model": place / "llama", "data": place / "data.jsonl", "eval_data": place / "data.jsonl"}
    train_here(**options(place, "elsewhere", steps=1) | given)
    monkeypatch.chdir(place)
    otherwise = {"model": "llama/", "data": "./data.jsonl", "eval_data": "data.jsonl"}
    train_here(**options(place, "elsewhere", steps=1) | otherwise)
    assert capsys.readouterr().out.endswith("is finished: nothing to do\n")
    train_here(**options(place, "elsewhere", steps=2) | otherwise)
    assert "goes on with --steps 2 (was 1)\n" in capsys.readouterr().out
    assert len(losses(place / "elsewhere")) == 2
    train_here(**options(place, "elsewhere", steps=1) | otherwise)
    assert json.loads((place / "elsewhere" / "run.json").read_text())["steps"] == 2  # as many as were done


def test_samples_to_evaluate_on_that_cannot_be_read_are_named_once(place, capsys):
    (place / "broken.jsonl").write_text('{"text": "the tier waits"}\nno sample\n')
    train_here(**options(place, "broken", steps=2, eval_data=place / "broken.jsonl", eval_every=1))
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": is not JSON")[0] for line in said] == [f"unwall: skipped: {place / 'broken.jsonl'}:2"]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_two_ranks_have_the_losses_of_one(place, undisturbed, ranks, kind):
    ranks(2).run(train_here, **options(place, f"two-{kind}", "disk", kind, accumulate=2, eval_data=place / "data.jsonl"))
    assert losses(place / f"two-{kind}") == pytest.approx(undisturbed[kind], rel=2e-5)
    ours, theirs = (read_log(place / name, "eval")[-1] for name in (f"two-{kind}", f"whole-{kind}"))
    assert ours["tokens"] == theirs["tokens"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)
    assert ours["perplexity"] == pytest.approx(math.exp(ours["loss"]))


def test_two_ranks_go_on_where_one_stopped(place, undisturbed, ranks):
    train_here(**options(place, "one-then-two", steps=3))
    ranks(2).run(train_here, **options(place, "one-then-two", steps=8))
    assert losses(place / "one-then-two") == pytest.approx(undisturbed["llama"], rel=2e-5)


def test_the_result_is_a_model_of_transformers(place, undisturbed):
    import transformers

    for kind in undisturbed:
        out = place / f"whole-{kind}"
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        asked = tokenizer("the tier", return_tensors="pt")
        made = model.generate(**asked, max_new_tokens=4, do_sample=False)
        assert made.shape[1] > asked["input_ids"].shape[1]


def test_an_export_of_a_run_has_its_tokenizer(place, undisturbed, tmp_path):
    import transformers

    run = place / "whole-llama"
    checkpoint = sorted((run / "checkpoints").glob("checkpoint-*"))[0]
    result = CliRunner().invoke(app, ["export", str(checkpoint), str(tmp_path / "out")])
    assert (result.exit_code, result.stderr) == (0, "")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        words("the tier")["input_ids"] == transformers.AutoTokenizer.from_pretrained(place / "llama")("the tier")["input_ids"]
    )
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    unfinished = tmp_path / "unfinished"
    shutil.copytree(run / "checkpoints", unfinished / "checkpoints")
    options = json.loads((run / "run.json").read_text())["options"]
    for model, complaint in ((options["model"], ""), ("gone", "the tokenizer is not written: gone, where")):
        (unfinished / "run.json").write_text(json.dumps({"version": 1, "options": options | {"model": model}}))
        result = CliRunner().invoke(app, ["export", str(unfinished), str(tmp_path / model.replace("/", "-"))])
        assert result.exit_code == 0
        assert result.stderr.startswith(complaint)
        assert (tmp_path / model.replace("/", "-") / "tokenizer.json").is_file() is not bool(complaint)
        assert ("that the run was started in" in result.stderr) is bool(complaint)

    for number, others in enumerate(([], {"options": None}, {"options": {"model": 5}})):  # another program's run.json
        (unfinished / "run.json").write_text(json.dumps(others))
        result = CliRunner().invoke(app, ["export", str(unfinished / "checkpoints"), str(tmp_path / f"others-{number}")])
        assert (result.exit_code, result.stderr) == (0, "")
        assert (tmp_path / f"others-{number}" / "model.safetensors").is_file()


def test_a_signal_saves_and_the_same_command_goes_on(place, undisturbed, monkeypatch, capsys):
    advance = loop.Loop._advance

    def interrupted(self, step, batch):
        advance(self, step, batch)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop.Loop, "_advance", interrupted)
    train_here(**options(place, "stopped"))
    assert "SIGTERM: step 5 of 8 is saved" in capsys.readouterr().out
    assert json.loads((place / "stopped" / "run.json").read_text())["status"] == "interrupted"
    monkeypatch.undo()
    train_here(**options(place, "stopped"))
    assert losses(place / "stopped") == pytest.approx(undisturbed["llama"], rel=1e-5)


def test_adapters_resume_and_load_with_peft(place):
    peft = pytest.importorskip("peft")
    import transformers

    train_here(**options(place, "lora-whole", lora=True, lora_rank=2))
    train_here(**options(place, "lora", lora=True, lora_rank=2, steps=4, save_every=2, keep=1))
    assert len(list((place / "lora" / "checkpoints").glob("*.pt"))) == 1
    train_here(**options(place, "lora", lora=True, lora_rank=2, keep=1))
    assert losses(place / "lora") == pytest.approx(losses(place / "lora-whole"), rel=1e-5)
    assert losses(place / "lora")[-1] < losses(place / "lora")[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.float32)
    ids = torch.arange(2, 40)[None]
    before = base(input_ids=ids).logits
    tuned = peft.PeftModel.from_pretrained(base, place / "lora")
    assert not torch.allclose(tuned(input_ids=ids).logits, before, atol=1e-3)


def test_a_model_to_plan_with_has_no_values(place):
    """Nor have its adapters: drawing those of 13 B parameters took seconds."""
    pytest.importorskip("peft")
    given = Options(model=str(place / "llama"), data=("x",), out="y", lora=True, lora_rank=2)
    found = list(empty_model(given, read_config(given)).parameters())
    assert all(param.is_meta for param in found)
    assert {param.requires_grad for param in found} == {True, False}


def test_random_weights_from_a_config(place):
    train_here(**options(place, "fresh") | {"model": place / "llama" / "config.json", "steps": 2, "epochs": 1.0})
    assert len(losses(place / "fresh")) == 2
    assert abs(losses(place / "fresh")[0] - math.log(260)) < 0.3


def test_a_loss_that_is_not_finite_names_its_samples(place, undisturbed, monkeypatch, capsys):
    from unwall.train.model import Trained

    plain = Trained.loss

    def spoilt(self, tensors, count):
        found = plain(self, tensors, count)
        return found * float("nan") if self.engine.steps == 3 else found

    monkeypatch.setattr(Trained, "loss", spoilt)
    with pytest.raises(TrainError, match=r"step 4: the loss is nan, in the sequence of .*data\.jsonl:\d+.*--on-nonfinite skip"):
        train_here(**options(place, "spoilt"))
    assert len(losses(place / "spoilt")) == 3
    monkeypatch.undo()

    calls = []

    def once(self, tensors, count):
        found = plain(self, tensors, count)
        calls.append(1)
        return found * float("nan") if len(calls) in (1, 2) else found

    monkeypatch.setattr(Trained, "loss", once)
    train_here(**options(place, "spoilt", on_nonfinite="skip"))
    lines = read_log(place / "spoilt")
    assert [line["step"] for line in lines if line.get("skipped")] == [4]
    assert lines[3]["loss"] is None
    assert math.isfinite(lines[-1]["loss"])
