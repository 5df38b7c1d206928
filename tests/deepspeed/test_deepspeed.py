"""A DeepSpeed config becomes a plan, and every one of its keys is accounted for."""

import copy
import json
import re
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import unwall
from unwall import Plan, PlanError
from unwall.deepspeed import Outcome, read, translate

ZERO2_CPU = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 100,
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 100, "total_num_steps": 1e4}},
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "initial_scale_power": 12,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
}
ZERO3_HF = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": float("inf"),
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ZERO3_NVME = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme/",
            "pin_memory": True,
            "buffer_count": 4,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": False,
            "ratio": 1.0,
        },
        "stage3_param_persistence_threshold": 1e5,
    },
    "aio": {"block_size": 1048576, "queue_depth": 16, "thread_count": 1, "single_submit": False, "overlap_events": True},
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
}
REAL = {"zero2_cpu": ZERO2_CPU, "zero3_hf": ZERO3_HF, "zero3_nvme": ZERO3_NVME}


def leaves(config, path=()):
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key)), repr(value)


def zero(**keys):
    return {"bf16": {"enabled": True}, "zero_optimization": keys}


def became(config):
    return {entry.key: entry for entry in translate(config).entries}


# -- whole files ----------------------------------------------------------------------------------------------------------


def test_zero2_with_the_optimizer_on_the_host():
    found = translate(ZERO2_CPU)
    assert found.plan == Plan(stage=2, optimizer="host", compute_dtype=torch.float16)
    entries = became(ZERO2_CPU)
    assert "max_grad_norm=1.0" in entries["gradient_clipping"].became
    assert "lr=2e-05" in entries["optimizer.params.lr"].became
    assert "betas=(0.9, 0.95)" in entries["optimizer.params.betas"].became
    assert "divided by 8" in entries["gradient_accumulation_steps"].became
    assert "scale = 2.0**12" in entries["fp16.initial_scale_power"].became
    assert entries["fp16.hysteresis"].outcome is Outcome.MISSING
    assert any("optimizer.scale(loss)" in note for note in found.notes)


def test_zero3_as_the_trainer_fills_it_in():
    found = translate(ZERO3_HF)
    assert found.plan == Plan(stage=3, params="host", optimizer="host", compute_dtype=torch.bfloat16)
    for entry in found.entries:
        assert (entry.outcome is Outcome.OPEN) == (entry.value == "auto"), entry
    entries = became(ZERO3_HF)
    assert entries["zero_optimization.reduce_bucket_size"].became == "unwall decides"
    assert entries["optimizer.params.lr"].became == "your script decides"
    assert entries["fp16.hysteresis"].outcome is Outcome.NOT_NEEDED  # not computing in fp16
    assert "weight_decay" not in entries["optimizer.type"].became  # it is there, and left open


def test_zero3_on_nvme():
    found = translate(ZERO3_NVME)
    assert found.plan == Plan(stage=3, params="disk", optimizer="disk", disk="/local_nvme", reduce_dtype=torch.float32)
    missing = {entry.key for entry in found.entries if entry.outcome is Outcome.MISSING}
    assert missing == {"activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing"}
    assert found.plan.activations == "auto"


@pytest.mark.parametrize("name", REAL)
def test_real_files_have_no_unknown_keys_and_print_as_a_table(name):
    found = translate(REAL[name])
    assert not [entry for entry in found.entries if entry.outcome is Outcome.UNKNOWN]
    lines = str(found).splitlines()
    assert lines[0] == str(found.plan)
    assert len(lines) == 2 + len(found.entries) + len(found.notes)
    start = lines[1].index("became")
    assert all(line[start - 2 : start] == "  " and line[start] != " " for line in lines[2 : 2 + len(found.entries)])


# -- every key is accounted for -------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["comment", "stage3_prefetch", "a.b", "enabled", "zero_optimization.stage", "zz", ""])
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 7, "auto", "x", [], [1, {"a": 2}]]),
    lambda inner: st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
SPARE = st.dictionaries(NAMES.map("x{}".format), VALUES, max_size=3)


@settings(deadline=None)
@given(st.sampled_from(sorted(REAL)), SPARE, SPARE, st.dictionaries(NAMES, VALUES, max_size=3), st.data())
def test_every_leaf_is_in_the_entries_exactly_once(name, at_top, in_zero, scheduler, data):
    """Real files, with some keys taken out or set to auto or null, and others put in."""
    config = copy.deepcopy(REAL[name])
    sections = [config["zero_optimization"], config.get("fp16", {}), config]
    for section in sections:
        for key in data.draw(st.lists(st.sampled_from(sorted(section) or ["zz"]), max_size=3)):
            section[key] = data.draw(st.sampled_from(["auto", None, "gone"]))
            if section[key] == "gone":
                del section[key]
    sections[0].update(in_zero)
    config.update(at_top | {"zero_optimization.stage": 1, "scheduler": scheduler})
    zero_now = config.get("zero_optimization")
    if isinstance(zero_now, dict) and zero_now.get("stage") is None and isinstance(zero_now.get("offload_param"), dict):
        with pytest.raises(PlanError, match=r"zero_optimization.stage 0"):  # DeepSpeed's default
            translate(config)
        return
    found = translate(config)
    assert Counter((entry.key, repr(entry.value)) for entry in found.entries) == Counter(leaves(config))
    assert all(entry.became for entry in found.entries)


def test_unknown_keys_are_listed_with_the_nearest_known_one():
    config = zero(stage=3, stage3_prefetch_bucketsize=5) | {
        "my_key": {"inner": [1, {"a": 2}]},
        "zero_optimisation": {"stage": 3},
    }
    unknown = {entry.key: entry.became for entry in translate(config).entries if entry.outcome is Outcome.UNKNOWN}
    assert set(unknown) == {"zero_optimization.stage3_prefetch_bucketsize", "my_key.inner", "zero_optimisation.stage"}
    assert (
        "did you mean zero_optimization.stage3_prefetch_bucket_size?" in unknown["zero_optimization.stage3_prefetch_bucketsize"]
    )
    assert "did you mean zero_optimization?" in unknown["zero_optimisation.stage"]


def test_a_dotted_key_is_not_taken_for_a_nested_one():
    found = translate(zero(stage=1) | {"zero_optimization.stage": 3})
    assert found.plan.stage == 1
    assert [entry.outcome for entry in found.entries if entry.key == "zero_optimization.stage"] == [
        Outcome.PLAN,
        Outcome.UNKNOWN,
    ]


# -- single keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(stage):
    assert translate(zero(stage=stage)).plan == Plan(stage=stage)


@pytest.mark.parametrize(("config", "stage"), [({}, 0), ({"zero_optimization": {}}, 0), (zero(stage="auto"), 3)])
def test_a_stage_that_is_not_said(config, stage):
    found = translate(config)
    assert found.plan.stage == stage
    assert any("DeepSpeed's default" in note for note in found.notes) == (stage == 0)


@pytest.mark.parametrize(("old", "stage"), [(True, 1), (False, 0)])
def test_zero_as_a_bool_in_old_files(old, stage):
    assert translate({"zero_optimization": old}).plan.stage == stage


@pytest.mark.parametrize(
    ("param", "optimizer", "stage", "expected"),
    [
        (None, None, 3, ("auto", "auto")),
        ("none", "none", 3, ("device", "device")),
        ("none", "cpu", 2, ("device", "host")),
        ("none", "cpu", 3, ("auto", "host")),  # "device" would hold whole parameters on every rank
        (None, "cpu", 1, ("auto", "host")),
        ("cpu", None, 3, ("host", "auto")),
        ("cpu", "none", 3, ("host", "device")),
        ("nvme", "cpu", 3, ("disk", "host")),
        ("auto", "auto", 3, ("auto", "auto")),
    ],
)
def test_tiers(param, optimizer, stage, expected):
    keys = {
        name: {"device": device, "nvme_path": "/fast"}
        for name, device in (("offload_param", param), ("offload_optimizer", optimizer))
    }
    found = translate(zero(stage=stage, **keys)).plan
    assert (found.params, found.optimizer) == expected
    assert found.disk == ("/fast" if "disk" in expected else None)


def test_two_nvme_paths_become_stripes_and_the_entries_say_so():
    both = {
        "offload_param": {"device": "nvme", "nvme_path": "/first"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/second"},
    }
    config = zero(stage=3, **both)
    assert translate(config).plan.disk == ("/first", "/second")
    for section in both:
        assert "striped" in became(config)[f"zero_optimization.{section}.nvme_path"].became


def test_old_names_of_offloading():
    assert translate(zero(stage=2, cpu_offload=True)).plan.optimizer == "host"
    assert translate(zero(stage=2, cpu_offload=False)).plan.optimizer == "auto"
    assert translate(zero(stage=3, cpu_offload_params=True, cpu_offload=True)).plan.params == "host"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, torch.bfloat16),
        ({"bfloat16": {"enabled": True}}, torch.bfloat16),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}, torch.float16),
        ({"fp16": {"enabled": "auto"}}, torch.bfloat16),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, torch.float32),
        ({"fp16": {"enabled": False}}, torch.float32),
        ({"bf16": {}}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_precision(precision, dtype):
    assert translate(precision).plan.compute_dtype is dtype


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"communication_data_type": "bf16"}, torch.bfloat16),
        ({"fp32_allreduce": True}, torch.float32),
        ({"fp32_allreduce": False}, None),
    ],
)
def test_reduce_dtype(keys, dtype):
    assert translate(keys).plan.reduce_dtype is dtype


@pytest.mark.parametrize(
    ("optimizer", "outcome", "words"),
    [
        ({"type": "Adam"}, Outcome.OPTIMIZER, r"unwall.AdamW .*weight_decay=0.0"),
        ({"type": "adam", "params": {"adam_w_mode": False}}, Outcome.OPTIMIZER, r"wrap\(torch.optim.Adam\("),
        ({"type": "SGD", "params": {"momentum": 0.9}}, Outcome.OPTIMIZER, r"wrap\(torch.optim.SGD\("),
        (
            {"type": "OneBitAdam", "params": {"freeze_step": 400}},
            Outcome.MISSING,
            "whole momentum on every rank.*reduce_dtype='int4'",
        ),
        ({"type": "sgd"}, Outcome.MISSING, "neither"),  # a module of torch.optim, no optimizer
    ],
)
def test_optimizers(optimizer, outcome, words):
    entry = became({"optimizer": optimizer})["optimizer.type"]
    assert entry.outcome is outcome
    assert re.search(words, entry.became)


def test_arguments_of_optimizers():
    def argument(outcome, **params):
        (name,) = params
        return became({"optimizer": {"type": outcome, "params": params}})[f"optimizer.params.{name}"]

    assert argument("SGD", momentum=0.9).became == "torch.optim.SGD(..., momentum=0.9)"
    assert argument("SGD", momentum="auto").outcome is Outcome.OPEN
    assert argument("Lamb", max_coeff=1).outcome is Outcome.MISSING
    assert argument("AdamW", amsgrad=True).outcome is Outcome.MISSING
    assert argument("AdamW", amsgrad=False).outcome is Outcome.NOT_NEEDED
    assert argument("AdamW", momentum=0.9).outcome is Outcome.UNKNOWN
    assert "max_grad_norm=2" in argument("AdamW", max_grad_norm=2).became


@pytest.mark.parametrize(
    ("key", "asks", "off"),
    [
        ("ignore_unused_parameters", False, True),
        ("mics_shard_size", 4, -1),
    ],
)
def test_features_that_unwall_lacks_count_only_where_they_are_asked_for(key, asks, off):
    assert became(zero(stage=3, **{key: asks}))[f"zero_optimization.{key}"].outcome is Outcome.MISSING
    assert became(zero(stage=3, **{key: off}))[f"zero_optimization.{key}"].outcome is Outcome.NOT_NEEDED


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({"zero_quantized_weights": True}, {"gather_dtype": "int8"}),
        ({"zero_quantized_gradients": True}, {"reduce_dtype": "int4"}),
        ({"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}, {"reduce_feedback": True}),
        ({"zero_hpz_partition_size": 8}, {"replica": "node", "node_ranks": 8}),
        ({"zero_hpz_partition_size": 1}, {"replica": None, "node_ranks": None}),
        ({"zero_quantized_weights": False, "zero_quantized_gradients": "auto"}, {"gather_dtype": None, "reduce_dtype": None}),
    ],
)
def test_what_zero_plus_plus_compresses(keys, fields):
    plan = translate(zero(stage=3, **keys)).plan
    assert {name: getattr(plan, name) for name in fields} == fields
    in_fp32 = translate({"zero_optimization": {"stage": 3, **keys}}).plan
    assert (in_fp32.gather_dtype, in_fp32.reduce_dtype, in_fp32.reduce_feedback) == (None, None, False)


def test_sparse_attention_becomes_a_pattern():
    section = {"mode": "fixed", "block": 16, "num_local_blocks": 4, "num_global_blocks": 1, "attention": "unidirectional"}
    translation = translate({"sparse_attention": section})
    expected = unwall.sparse.from_deepspeed(section)
    assert torch.equal(translation.attention.blocks(32), expected.blocks(32))
    assert became({"sparse_attention": section})["sparse_attention.mode"].outcome is Outcome.SCRIPT
    assert "unwall.sparse.use" in became({"sparse_attention": section})["sparse_attention.mode"].became
    assert translate({"sparse_attention": {"mode": "dense"}}).attention is None
    with pytest.raises(PlanError, match="mode is one of"):
        translate({"sparse_attention": {"mode": "spiral"}})


# -- Plan.from_deepspeed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_one_warning_lists_all_that_the_plan_does_not_carry(name):
    config = REAL[name] | {"my_key": 1}
    with pytest.warns(UserWarning, match="does not carry everything") as caught:
        plan = Plan.from_deepspeed(config)
    assert plan == translate(config).plan
    assert len(caught) == 1
    assert caught[0].filename == __file__
    lines = str(caught[0].message).splitlines()
    listed = {line.split(" = ")[0].strip() for line in lines if " -> " in line}
    carried = (Outcome.PLAN, Outcome.NOT_NEEDED, Outcome.OPEN)
    assert listed == {entry.key for entry in translate(config).entries if entry.outcome not in carried}
    assert "my_key" in listed


def test_no_warning_where_the_plan_carries_all():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = Plan.from_deepspeed(zero(stage=3, overlap_comm=True, offload_optimizer={"device": "cpu"}))
    assert plan == Plan(stage=3, optimizer="host")


def test_such_a_plan_trains():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    plan = translate(ZERO3_HF).plan
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), lr=0.1)
    device = next(model.parameters()).device
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 8, device=device)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] != losses[0]


def test_a_file_and_its_dict_give_the_same(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO3_NVME), encoding="utf-8-sig")
    before = copy.deepcopy(ZERO3_NVME)
    assert translate(read(path)) == translate(read(str(path))) == translate(ZERO3_NVME)
    assert before == ZERO3_NVME


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (zero(stage="three"), r"zero_optimization.stage is 0, 1, 2 or 3 .*'three'"),
        (zero(stage=4), r"zero_optimization.stage is .*4"),
        (zero(stage=True), r"zero_optimization.stage is .*True"),
        (zero(stage={"a": 1}), r"zero_optimization.stage is .*got an object"),
        ({"zero_optimization": "yes"}, r"zero_optimization is an object"),
        ({"optimizer": "AdamW"}, r"optimizer is an object"),
        ({"optimizer": {"params": {"lr": "high"}}}, r"optimizer.params.lr is a number"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, r"optimizer.params.betas is two numbers"),
        ({"gradient_clipping": -1}, r"gradient_clipping is a number, 0 or more.*-1"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps is a whole number, 1 or more"),
        ({"train_batch_size": 2.5}, r"train_batch_size is a whole number"),
        ({"bf16": {"enabled": "yes"}}, r"bf16.enabled is true or false.*'yes'"),
        ({"communication_data_type": "int8"}, r"communication_data_type is one of"),
        ({"aio": {"block_size": "1MB"}}, r"aio.block_size is a whole number"),
        (zero(stage=3, offload_param={"device": "tape"}), r"offload_param.device is one of none, cpu, nvme.*'tape'"),
        (zero(stage=3, offload_param={"device": "nvme"}), r"no zero_optimization.offload_param.nvme_path"),
        (
            zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": ""}),
            r"no zero_optimization.offload_optimizer.nvme_path",
        ),
        (zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 2}), r"offload_optimizer.ratio is a number from 0 to 1"),
        (zero(stage=2, offload_param={"device": "cpu"}), r"offload_param.device is 'cpu' with zero_optimization.stage 2"),
        (zero(stage=2, cpu_offload_param=True), r"stage 3 only"),
        (zero(stage=3, cpu_offload=True, offload_optimizer={"device": "nvme", "nvme_path": "/a"}), r"cpu_offload is true, but"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, r"bf16.enabled and fp16.enabled are both true"),
        ({"fp32_allreduce": True, "communication_data_type": "fp16"}, r"fp32_allreduce is true, but"),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            r"train_batch_size 30 is no multiple",
        ),
        ({1: 2}, r"keys of a DeepSpeed config are strings, got 1"),
        (7, r"path of a JSON file or a dict, got int"),
    ],
)
def test_bad_configs_name_the_key(config, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_deepspeed(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'stage': 3}", r"ds.json: is not JSON: .*line 1"),
        ("", r"is not JSON"),
        (b"\xff\xfe\x00", r"is not JSON"),
        ("[1]", r"must hold a JSON object, got list"),
        ('{"bf16": {"enabled": true, "enabled": false}}', r"the key enabled is there twice"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError, match=message):
        Plan.from_deepspeed(path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(PlanError, match=r"missing.json: cannot be read: No such file"):
        Plan.from_deepspeed(tmp_path / "missing.json")
    with pytest.raises(PlanError, match=r"cannot be read"):
        Plan.from_deepspeed(tmp_path)
