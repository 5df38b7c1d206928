"""A tiny model directory with a tokenizer made on the spot, data files, and ``unwall train`` as a process."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [
    "the",
    "a",
    "one",
    "tier",
    "group",
    "shard",
    "state",
    "trace",
    "moves",
    "waits",
    "reads",
    "writes",
    "host",
    "disk",
    "device",
    "slowly",
    "at",
    "once",
]


def make_tokenizer(folder: Path, chat: bool = True):
    """Byte level: 256 bytes and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1} | {letter: number + 2 for number, letter in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    if chat:
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(folder: Path, kind: str = "llama", vocab: int = 260, weights: bool = True) -> Path:
    """``llama`` or ``qwen3_moe``, with its tokenizer."""
    import transformers as hf

    common = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": 128, "eos_token_id": 1, "pad_token_id": 0,
        "bos_token_id": None,
    }  # fmt: skip
    if kind == "llama":
        config = hf.LlamaConfig(**common, tie_word_embeddings=False)
    else:
        config = hf.Qwen3MoeConfig(**common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8)
    if weights:
        torch.manual_seed(7)
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def sentence(source: random.Random, words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(words))


def make_jsonl(path: Path, rows: int = 60) -> Path:
    """Samples of all three kinds and of many lengths."""
    source = random.Random(5)
    with path.open("w") as out:
        for number in range(rows):
            text = sentence(source, source.randint(2, 30))
            kinds = [
                {"text": text},
                {"prompt": "say: ", "completion": sentence(source, 3)},
                {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": sentence(source, 4)}]},
            ]
            out.write(json.dumps(kinds[number % 3]) + "\n")
    return path


def make_plan(path: Path, tier: str, disk: Path | None = None) -> Path:
    """fp32, so that losses can be compared to the last digits."""
    lines = ['compute_dtype = "float32"', f'params = "{tier}"', f'optimizer = "{tier}"']
    if tier == "disk":
        disk.mkdir(exist_ok=True)
        lines.append(f'disk = "{disk}"')
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*arguments, **options) -> list[str]:
    """``unwall train`` with options; a name that ends with ``=True`` is a flag."""
    found = [sys.executable, "-m", "unwall", "train", *map(str, arguments)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [flag, str(value)]
    return found


def environment(**more) -> dict[str, str]:
    roots = [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"} | more


def run_process(*arguments, limit_s: float = 280, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments, **options), env=environment(), capture_output=True, text=True, timeout=limit_s, check=False
    )


def read_log(out: Path, kind: str = "step") -> list[dict]:
    return [line for line in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if line["kind"] == kind]


def losses(out: Path) -> list[float]:
    lines = read_log(out)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def small_machine(_hardware, ranks, *_):
    """Instead of a measurement: what ``machine_of`` gives."""
    from unwall.planner.hardware import Hardware

    rates = {"float32": 1e11, "bfloat16": 1e11}
    found = Hardware(
        name="this machine", devices_per_node=ranks, device_bytes=2**33, host_bytes=2**33, disk_bytes=2**33,
        host_to_device_bytes_per_s=1e10, device_to_host_bytes_per_s=1e10, host_memory_bytes_per_s=1e10,
        disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=1e9, matmul_flops_per_s=rates, is_host=True,
    )  # fmt: skip
    return found, ranks


def train_here(**options) -> None:
    """``unwall train`` in this process, or as one rank of a pool; the machine is not measured."""
    import torch.distributed as dist

    from unwall.train import command, planning
    from unwall.train.options import Options

    measured, planning.machine_of = planning.machine_of, small_machine
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    said = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update({name: str(value) for name, value in said.items()})
    try:
        command.train(Options(**{name: _plain(name, value) for name, value in options.items()}))
    finally:
        planning.machine_of = measured
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _plain(name: str, value):
    if name in ("data", "eval_data"):
        return tuple(map(str, value if isinstance(value, (list, tuple)) else [value]))
    return str(value) if isinstance(value, Path) else value
