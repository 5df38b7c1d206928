"""``Trainer`` and TRL's ``SFTTrainer`` with a sharded model against the plain ones: the same losses, norms and files."""

import contextlib
import os
import tempfile
import warnings

import pytest
import torch
from ranks import rank_and_world

transformers = pytest.importorskip("transformers")
accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")

import unwall  # noqa: E402
from unwall.integrations.transformers import Trainer, TrainerMixin  # noqa: E402

ROWS = [
    {"input_ids": row, "labels": row.clone().index_fill_(0, torch.arange(number % 4), -100)}
    for number, row in enumerate(torch.randint(0, 64, (40, 12), generator=torch.Generator().manual_seed(1)))
]
"""With unequal numbers of labels, so that a wrong scale of the loss over ranks or passes shows."""
USUAL = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 1, "lr_scheduler_type": "cosine",
    "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False,
    "use_cpu": not torch.cuda.is_available(),
}  # fmt: skip


LIMIT_S = 400.0
"""The libraries are imported by each rank, which takes long where others work, too."""


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=False, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@contextlib.contextmanager
def launched():
    """As torchrun starts a process, and as if it were a new one."""
    rank, world = rank_and_world()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world} if world > 1 else {}
    os.environ.update({name: str(value) for name, value in names.items()})
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for name in names:
        del os.environ[name]


def history(trainer):
    """Loss, norm and learning rate of each step, and what evaluations gave."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [[entry[n] for n in names if n in entry] for entry in trainer.state.log_history if set(names) & set(entry)]


def train(kind, out, resume=None, model=llama, plan=None, optimizer=None, **options):
    with launched():
        args = transformers.TrainingArguments(output_dir=str(out), **(USUAL | options))
        more = {} if kind is transformers.Trainer else {"plan": plan, "optimizer_cls_and_kwargs": optimizer}
        trainer = kind(model=model(), args=args, train_dataset=ROWS, eval_dataset=ROWS[:6], **more)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        return trainer


def same(found, expected, **close):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **(close or {"rtol": 2e-5, "atol": 1e-6}))


def histories(out, *cases):
    return [history(train(kind, f"{out}/{number}", **options)) for number, (kind, options) in enumerate(cases)]


@pytest.mark.parametrize("world", [1, 2])
def test_trains_as_the_plain_trainer(ranks, tmp_path, world):
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    streamed = unwall.Plan(params="host", optimizer="disk", disk=tempfile.mkdtemp())
    cases = [(transformers.Trainer, evaluated), (Trainer, evaluated), (Trainer, evaluated | {"plan": streamed})]
    plain, ours, disk = ranks(world).run(histories, str(tmp_path), *cases, limit_s=LIMIT_S)[0]
    same(ours, plain)
    same(disk, plain)
    assert max(step[1] for step in ours if len(step) == 3) > 0.5, "nothing was clipped"


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.0},
        {"gradient_checkpointing": True},
        {"optim": "sgd", "learning_rate": 0.5},
        {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1},
    ],
    ids=["no clipping", "gradient checkpointing", "sgd", "label smoothing"],
)
def test_honours_its_arguments(tmp_path, options):
    same(history(train(Trainer, tmp_path / "a", **options)), history(train(transformers.Trainer, tmp_path / "b", **options)))


AT_ONCE = (unwall.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "update_in_backward": True})


@pytest.mark.parametrize("grads", ["auto", "transient"])
def test_gradients_that_are_used_in_backward_have_no_norm(tmp_path, grads):
    plan = unwall.Plan(params="host", optimizer="host", grads=grads)
    options = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
    ours = history(train(Trainer, tmp_path / "a", plan=plan, optimizer=AT_ONCE, **options))
    plain = history(train(transformers.Trainer, tmp_path / "b", **options))
    same(ours, [[loss, rate] for loss, _, rate in plain])


def test_bf16_computes_in_bf16(tmp_path):
    trainer = train(Trainer, tmp_path / "a", bf16=True)
    assert unwall.api.engine(trainer.model).plan.compute_dtype is torch.bfloat16
    same(history(trainer), history(train(transformers.Trainer, tmp_path / "b", bf16=True)), rtol=0.05, atol=0.05)


def resumed(out):
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": 6}
    whole = train(Trainer, f"{out}/run", **saving)
    kept = sorted(name for name in os.listdir(f"{out}/run") if name.startswith("checkpoint"))
    again = train(Trainer, f"{out}/again", resume=f"{out}/run/checkpoint-4", **saving)
    whole.save_model(f"{out}/final")
    return history(whole), history(again), kept, whole.model.state_dict()


@pytest.mark.parametrize("world", [1, 2])
def test_resumes_and_writes_what_transformers_loads(ranks, tmp_path, world):
    whole, again, kept, state = ranks(world).run(resumed, str(tmp_path), limit_s=LIMIT_S)[0]
    assert again == whole
    assert kept == ["checkpoint-4", "checkpoint-6"]
    for folder in ("final", "run/checkpoint-6"):
        loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict())
        torch.testing.assert_close(loaded, dict(state), rtol=0, atol=0)


def test_goes_on_from_a_checkpoint_of_the_plain_trainer(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    plain = train(transformers.Trainer, tmp_path / "plain", **saving)
    same(history(train(Trainer, tmp_path / "ours", resume=tmp_path / "plain/checkpoint-2", **saving)), history(plain))


@pytest.mark.parametrize("only_model", [False, True])
def test_loads_the_best_model_at_the_end(tmp_path, only_model):
    best = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
        "learning_rate": 0.3, "warmup_steps": 0, "max_steps": 3, "save_only_model": only_model,
    }  # fmt: skip
    trainer = train(Trainer, tmp_path, **best)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert min(losses) < losses[-1], "the last one is the best: nothing to load"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-5)


def lora():
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))


def test_a_peft_model_saves_its_adapters_and_no_base(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "model": lora}
    whole = train(Trainer, tmp_path / "run", **saving)
    same(history(whole), history(train(transformers.Trainer, tmp_path / "plain", model=lora)))
    files = sorted(path.name for path in (tmp_path / "run/checkpoint-2").iterdir())
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    assert "unwall" not in files
    again = train(Trainer, tmp_path / "again", resume=tmp_path / "run/checkpoint-2", **saving)
    assert history(again) == history(whole)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "run/checkpoint-4")
    ids = ROWS[0]["input_ids"][None]
    whole.model.eval()
    torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, whole.model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


def words():
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w1", pad_token="w2")


def tuned(out, adapters):
    """SFTTrainer, plain and sharded."""
    import datasets
    import trl

    class Sharded(TrainerMixin, trl.SFTTrainer):
        pass

    rows = datasets.Dataset.from_dict({"text": [" ".join(f"w{n}" for n in row["input_ids"].tolist()) for row in ROWS]})
    found = []
    for kind in (trl.SFTTrainer, Sharded):
        with launched():
            args = trl.SFTConfig(output_dir=f"{out}/{kind.__name__}", max_length=16, bf16=False, **USUAL)
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapters else None
            trainer = kind(llama(), args=args, train_dataset=rows, processing_class=words(), peft_config=config)
            trainer.train()
            trainer.save_model()
            found.append((history(trainer), sorted(os.listdir(args.output_dir))))
    return found


@pytest.mark.parametrize(("world", "adapters"), [(1, False), (1, True), pytest.param(2, True, marks=pytest.mark.drill)])
def test_tunes_as_sft_trainer(ranks, tmp_path, world, adapters):
    pytest.importorskip("trl")
    (plain, files), (ours, our_files) = ranks(world).run(tuned, str(tmp_path), adapters, limit_s=LIMIT_S)[0]
    same(ours, plain)
    assert ("adapter_model.safetensors" if adapters else "model.safetensors") in our_files
    assert set(files) - {"README.md", "chat_template.jinja"} <= set(our_files)


@pytest.mark.parametrize("adapters", [False, True])
def test_prefers_as_dpo_trainer(tmp_path, adapters):
    """The model that it is compared with is a second one, or the base without its adapters."""
    trl = pytest.importorskip("trl")
    import datasets

    class Sharded(TrainerMixin, trl.DPOTrainer):
        pass

    texts = [" ".join(f"w{n}" for n in row["input_ids"][:5].tolist()) for row in ROWS]
    answers = [f" {text}" for text in texts]
    rows = datasets.Dataset.from_dict({"prompt": texts, "chosen": answers[::-1], "rejected": answers[5:] + answers[:5]})
    found = []
    for kind in (trl.DPOTrainer, Sharded):
        with launched():
            args = trl.DPOConfig(output_dir=str(tmp_path / kind.__name__), max_length=16, bf16=False, **USUAL)
            lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
            more = {"peft_config": lora} if adapters else {"ref_model": llama()}
            trainer = kind(llama(), args=args, train_dataset=rows, processing_class=words(), **more)
            trainer.train()
            found.append(history(trainer))
    same(found[1], found[0])
    assert len({step[0] for step in found[0]}) > 2, "nothing was learned: both models give the same all along"


def test_a_sharded_model_is_taken_as_it_is(tmp_path):
    def sharded():
        return unwall.shard(llama(), unwall.Plan(compute_dtype=torch.float32, optimizer="host"))

    trainer = train(Trainer, tmp_path / "a", model=sharded)
    assert unwall.api.engine(trainer.model).plan.optimizer == "host"
    same(history(trainer), history(train(transformers.Trainer, tmp_path / "b")))
    with pytest.raises(ValueError, match="say the same in both"):
        train(Trainer, tmp_path / "c", model=sharded, bf16=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": "adafactor"}, "optim='adafactor' cannot update shards"),
        ({"torch_compile": True}, "torch_compile"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"save_on_each_node": True}, "one directory"),
        ({"optimizer": AT_ONCE}, "write max_grad_norm=0"),
        ({"plan": unwall.Plan(reduce_op="sum")}, "reduce_op"),
        ({"plan": unwall.Plan(compute_dtype=torch.float16), "bf16": True}, "say the same in both"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        train(Trainer, tmp_path, **options)


def test_optimizers_built_before_are_refused(tmp_path):
    model = llama()
    args = transformers.TrainingArguments(output_dir=str(tmp_path))
    with launched(), pytest.raises(ValueError, match="optimizer_cls_and_kwargs"):
        Trainer(model=model, args=args, optimizers=(torch.optim.AdamW(model.parameters()), None))
