"""Adapters on a frozen Llama that streams from the host, against the same model resident: ``python -m bench.lora --shape 8b``.

Each row runs in a process of its own: plain PyTorch with all weights on the device (``plain``), and unwall with the frozen
weights on the host and ``--device-bytes`` for what comes and goes (``unwall``). Both have the same weights (at random, drawn by
name), rank-16 adapters from ``peft`` on every linear layer, and recompute every block. Reported: the step, its ratio to the
first row, the peak of the device's memory, losses, and how long compute waited for the link.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import unwall
from bench.hf_model import SHAPES, config_of
from bench.workload import COMPUTE_DTYPE, initial

ROWS = ("plain", "unwall")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LIMIT_S = 110.0
"""For one row."""


def adapted(shape: str, rank: int) -> nn.Module:
    """The model with its adapters, on meta but for the frequencies of its positions."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**config_of(shape))
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(COMPUTE_DTYPE)
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=LAYERS, lora_dropout=0.0)
        found: nn.Module = get_peft_model(model, lora)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    found.config.use_cache = False
    return found


def weights_of(model: nn.Module, device: torch.device) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Each parameter with its module, its name there and its first value. The second half of an adapter begins at 0."""
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            value = initial(f"{prefix}.{name}", param.shape, device)
            yield module, name, torch.zeros_like(value) if "lora_B" in prefix else value


def start(row: str, given: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = adapted(given.shape, given.rank)
    if row == "plain":
        for module, name, value in weights_of(model, device):
            old = getattr(module, name)
            dtype = torch.float32 if old.requires_grad else COMPUTE_DTYPE
            setattr(module, name, nn.Parameter(value.to(dtype), requires_grad=old.requires_grad))
        model.to(device)
        trained = [param for param in model.parameters() if param.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    unwall.shard(model, unwall.Plan(params="host", optimizer="host", device_bytes=given.device_bytes, activations="keep"))
    for module, name, value in weights_of(model, device):
        with unwall.full_params([getattr(module, name)], write=True), torch.no_grad():
            getattr(module, name).copy_(value)
    return model, unwall.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)


def train(row: str, given: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    model, optimizer = start(row, given, device)
    model.train()
    tokens = torch.randint(
        0, SHAPES[given.shape]["vocab_size"], (given.batch, given.seq), generator=torch.Generator().manual_seed(0)
    ).to(device)
    times, losses = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for number in range(given.warm + given.steps):
        if number == given.warm and row == "unwall":
            unwall.stats(model).reset()
        wait()
        begun = time.perf_counter()
        with torch.autocast(device.type, COMPUTE_DTYPE, enabled=row == "plain"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()
        times.append(time.perf_counter() - begun)
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    stalled = 0.0
    if row == "unwall":
        stalled = sum(link.stall_seconds for link in unwall.stats(model).links.values()) / given.steps
    found = {"row": row, "step_s": statistics.median(times[given.warm :]), "times_s": times, "peak_bytes": peak}
    return found | {"losses": [losses[0], losses[-1]], "stalled_s": stalled}


def _in_process(row: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.lora", "--row", row, *arguments]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"row": row, "error": f"not done in {LIMIT_S:.0f} s"}
    if found.returncode:
        return {"row": row, "error": (found.stderr.strip().splitlines() or ["?"])[-1][:200]}
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--device-bytes", default="6GiB")
    parser.add_argument("--row", choices=ROWS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(train(given.row, given)))
        return
    print("| row | step s | against the first | stalled s per step | peak GiB | losses |\n|---|---|---|---|---|---|")
    base = None
    for row in ROWS:
        found = _in_process(row, sys.argv[1:])
        if "error" in found:
            print(f"| {row} | {found['error']} | | | | |", flush=True)
            continue
        base = base or found["step_s"]
        losses = ", ".join(f"{loss:.4f}" for loss in found["losses"])
        ratio, peak = found["step_s"] / base, found["peak_bytes"] / 2**30
        print(f"| {row} | {found['step_s']:.4f} | {ratio:.3f} | {found['stalled_s']:.3f} | {peak:.2f} | {losses} |", flush=True)


if __name__ == "__main__":
    main()
