"""LoRA adapters on a frozen model whose weights stream from the host (or the disk) in every step.

Adapters, their gradients and states are small and stay on the device; of the base the device holds a few layers at a time.

Run it:  python examples/lora.py        (needs the packages transformers and peft)
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import unwall

CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
)


def main() -> None:
    torch.manual_seed(0)
    base = LlamaForCausalLM(CONFIG)  # yours: AutoModelForCausalLM.from_pretrained(...)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["lm_head"]))
    unwall.shard(model, unwall.Plan(params="host", optimizer="device"))
    optimizer = unwall.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)
    device = next(model.parameters()).device

    tokens = torch.randint(256, (1, 24), device=device).repeat(4, 2)
    for step in range(16):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)  # the adapter alone, in peft's format
        torch.manual_seed(0)
        again = PeftModel.from_pretrained(LlamaForCausalLM(CONFIG), scratch)
        print(f"adapter of {sum(file.stat().st_size for file in Path(scratch).iterdir())} bytes,", end=" ")
        with torch.no_grad():
            print(f"in plain PyTorch: loss {again(input_ids=tokens.cpu(), labels=tokens.cpu()).loss.item():.3f}")


if __name__ == "__main__":
    main()
