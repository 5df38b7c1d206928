"""A Llama with random weights as a directory of transformers, with a byte-level tokenizer and a text file, in bounded memory.

    python -m bench.hf_model DIR --shape 8b

For `unwall train` on a machine without network: nothing is downloaded, and only one matrix is in memory at a time.
"""

import argparse
import json
import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 176, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "13b": {"hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 13824, "num_attention_heads": 40,
            "num_key_value_heads": 40, "vocab_size": 32000},
}  # fmt: skip
FILE_BYTES = 4 << 30
WORDS = ("a", "tier", "is", "memory", "and", "a", "group", "moves", "between", "them", "while", "others", "compute")


def config_of(shape: str) -> dict:
    return SHAPES[shape] | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 500000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def tensors_of(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights."""
    size = SHAPES[shape]
    hidden, ffn, vocab = size["hidden_size"], size["intermediate_size"], size["vocab_size"]
    keys = hidden // size["num_attention_heads"] * size["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(size["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield f"{name}.self_attn.{part}_proj.weight", (rows, hidden)
        yield f"{name}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{name}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{name}.mlp.down_proj.weight", (hidden, ffn)
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def write_weights(folder: Path, shape: str) -> int:
    """Files of about FILE_BYTES with an index. Gives the number of parameters."""
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = total = 0
    for name, sizes in tensors_of(shape):
        nbytes = 2 * math.prod(sizes)
        if filled + nbytes > FILE_BYTES and files[-1]:
            files.append([])
            filled = 0
        files[-1].append((name, sizes))
        filled += nbytes
        total += nbytes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    placed = {}
    for number, entries in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        placed |= dict.fromkeys((name for name, _ in entries), file)
        _write_file(folder / file, entries, device)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total // 2


def _write_file(path: Path, entries: list[tuple[str, tuple[int, ...]]], device: str) -> None:
    table: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, sizes in entries:
        end = offset + 2 * math.prod(sizes)
        table[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for _, sizes in entries:
            if len(sizes) == 1:
                made = torch.ones(sizes, dtype=torch.bfloat16)
            else:
                made = torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(std=0.02).cpu()
            made.view(torch.uint8).numpy().tofile(out)


def write_tokenizer(folder: Path) -> None:
    """256 bytes and two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<eos>": 1} | {letter: number + 2 for number, letter in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def write_text(path: Path, nbytes: int) -> None:
    source = random.Random(0)
    with path.open("w") as out:
        while out.tell() < nbytes:
            out.write(" ".join(source.choice(WORDS) for _ in range(20)) + ".\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--text-bytes", type=int, default=4 << 20)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "config.json").write_text(json.dumps(config_of(given.shape), indent=1))
    write_tokenizer(given.folder)
    write_text(given.folder / "text.txt", given.text_bytes)
    print(f"{given.folder}: {write_weights(given.folder, given.shape):,} parameters")


if __name__ == "__main__":
    main()
