"""A transformers model, its parameters and optimizer states in host memory. Nothing is downloaded: a tiny Llama, random tokens.

For a model of your own: build it inside ``unwall.init()`` with ``AutoModelForCausalLM.from_config``, or load it with
``from_pretrained``; then ``unwall.shard`` it. The loop stays the same.

Run it:  python examples/transformers_model.py        (needs the package transformers)
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import unwall

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def main() -> None:
    torch.manual_seed(0)
    with unwall.init():
        model = LlamaForCausalLM(CONFIG)
    unwall.shard(model, unwall.Plan(params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, max_grad_norm=1.0)
    device = next(model.parameters()).device

    tokens = torch.randint(CONFIG.vocab_size, (4, 32), device=device)
    for step in range(10):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    with unwall.full_params(model.lm_head):  # whole again, to look at or to save
        print(f"lm_head {tuple(model.lm_head.weight.shape)}, norm {model.lm_head.weight.norm().item():.2f}")


if __name__ == "__main__":
    main()
