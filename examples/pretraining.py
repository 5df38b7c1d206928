"""A language model from scratch: built inside ``unwall.init`` (never whole), trained on bytes inside budgets, over three tiers.

Run it:  python examples/pretraining.py [--text FILE] [--layers 4] [--hidden 64] [--disk DIR]      (needs transformers)
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaConfig, LlamaForCausalLM

import unwall


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--text", type=Path, default=Path(__file__))
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--hidden", type=int, default=64)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--seq", type=int, default=64)
    arguments.add_argument("--device-bytes", default="768KiB")
    arguments.add_argument("--host-bytes", default="2MiB")
    arguments.add_argument("--disk", type=Path)
    asked = arguments.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=asked.hidden,
        intermediate_size=2 * asked.hidden,
        num_hidden_layers=asked.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=asked.seq,
    )
    with tempfile.TemporaryDirectory() as scratch:
        plan = unwall.Plan(device_bytes=asked.device_bytes, host_bytes=asked.host_bytes, disk=asked.disk or scratch)
        with unwall.init(plan):
            model = LlamaForCausalLM(config)
        unwall.shard(model, plan)
        optimizer = unwall.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, max_grad_norm=1.0)
        scheduler = CosineAnnealingLR(optimizer, asked.steps)
        device = next(model.parameters()).device

        tokens = torch.frombuffer(bytearray(asked.text.read_bytes()), dtype=torch.uint8).long().to(device)
        for step in range(asked.steps):
            starts = torch.randint(len(tokens) - asked.seq, (4,)).tolist()
            batch = torch.stack([tokens[start : start + asked.seq] for start in starts])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % 6 == 0 or step == asked.steps - 1:
                print(f"step {step + 1}: loss {loss.item():.3f}")
        print(unwall.stats(model))


if __name__ == "__main__":
    main()
