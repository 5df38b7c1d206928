"""Whatever is written where a user writes something: an answer, or one line that says what is wrong."""

import functools
import json
import random

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from unwall import Plan, shard
from unwall.cli import app
from unwall.deepspeed import translate

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "zero_optimization": {
        "stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
    },
}  # fmt: skip
STRANGE = [
    0, -1, 1, 2**31, 2**63, 10**40, 0.5, float("nan"), float("inf"), True, False, None, "", " ", "-1", "x", "20GiB", "1e9", "\0",
    "ä" * 40, [], {}, [1], ["disk", 3], {"a": {"b": []}}, "../..", "auto", "disk", "8 PiB", "--help",
]  # fmt: skip
FIELDS = [
    "stage", "params", "grads", "optimizer", "activations", "disk", "device_bytes", "host_bytes", "disk_bytes", "passes",
    "compute_dtype", "reduce_dtype", "keep_fp32",
]  # fmt: skip
OPTIONS = [
    "gpus",
    "nodes",
    "batch",
    "seq",
    "device-bytes",
    "host-bytes",
    "disk-bytes",
    "disk",
    "dtype",
    "objective",
    "vocab",
    "tiles",
    "plot",
]


def mutated(value, choose: random.Random):
    """One leaf of nested dicts replaced, removed or added."""
    if not isinstance(value, dict) or not value or choose.random() < 0.1:
        return choose.choice(STRANGE)
    copy = dict(value)
    key = choose.choice(list(copy))
    fate = choose.random()
    if fate < 0.15:
        del copy[key]
    elif fate < 0.25:
        copy[choose.choice(["", "stage", "unknown", "ä"])] = choose.choice(STRANGE)
    else:
        copy[key] = mutated(copy[key], choose)
    return copy


def answered(run: list[str]) -> bool:
    """The command answers, or says in one line what is wrong (typer's own complaints are a box)."""
    result = CliRunner().invoke(app, run)
    assert result.exception is None or isinstance(result.exception, SystemExit), (run, result.exception)
    if result.exit_code == 1 or result.stderr.startswith("unwall"):
        assert result.stderr.startswith("unwall: "), (run, result.stderr)
        assert result.stderr.count("\n") == 1, (run, result.stderr)
        assert len(result.stderr) < 1200, (run, result.stderr)
    else:
        assert result.exit_code in (0, 2), (run, result.output)
    return result.exit_code == 0


@pytest.mark.drill
@pytest.mark.parametrize("seed", range(2))
def test_the_command_answers_or_says_in_one_line_what_is_wrong(seed, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # some of it names files
    choose, config, answers = random.Random(seed), tmp_path / "config.json", 0
    for _ in range(150):
        model = choose.choice(["4x64", "2x32x2", str(config), "4x0", "x", "9999999x9", "os:getcwd", "", "4x" + "9" * 5000])
        content = json.dumps(mutated(LLAMA, choose))
        config.write_text(choose.choice([content, content, content[: choose.randrange(len(content))], "[" * 50_000]))
        run = ["plan", model, "--hardware", choose.choice(["8xh100", "8xh100", "dgx-2", "none", str(config)])]
        for option in choose.sample(OPTIONS, choose.randrange(3)):
            run += [f"--{option}", str(choose.choice(STRANGE))]
        answers += answered(run)
    assert answers > 5  # not everything is refused


def refusal(call) -> str | None:
    """What is said against it, if anything. Any other error than these is a defect."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return None


@pytest.mark.drill
def test_a_plan_is_made_or_refused_by_name():
    choose = random.Random(0)
    values = [*STRANGE, torch.float16, torch.int8]
    refused = 0
    for _ in range(350):
        fields = {name: choose.choice(values) for name in choose.sample(FIELDS, choose.randrange(1, 4))}
        found = refusal(functools.partial(Plan, **fields))
        assert found is None or any(name in found for name in (*fields, "disk")), (fields, found)
        refused += found is not None
    assert 100 < refused < 350


@pytest.mark.drill
def test_a_plan_that_is_none_leaves_the_model_alone():
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    for value in STRANGE:
        if value is not None:
            with pytest.raises(TypeError, match=r"plan is an unwall\.Plan or None"):
                shard(model, value)
    assert torch.equal(model.weight, before)


@pytest.mark.drill
def test_a_deepspeed_config_is_read_or_refused():
    choose = random.Random(0)
    refused = 0
    for _ in range(350):
        config = DEEPSPEED
        for _ in range(choose.randrange(1, 4)):
            config = mutated(config, choose)
            config = config if isinstance(config, dict) else DEEPSPEED
        found = refusal(functools.partial(translate, config))
        assert found is None or ("\n" not in found and len(found) > 20), (config, found)
        refused += found is not None
    assert 50 < refused < 350
