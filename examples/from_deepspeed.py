"""A DeepSpeed config as unwall's plan, key by key, and the loop that replaces ``deepspeed.initialize``.

Run it:  python examples/from_deepspeed.py                     (with the config below)
         python examples/from_deepspeed.py ds_config.json      (only shows what its keys become)
"""

import sys
from typing import Any

import torch

import unwall
from unwall.deepspeed import read, translate

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
}


def train(plan: unwall.Plan) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    unwall.shard(model, plan)  # instead of deepspeed.initialize
    adamw = CONFIG["optimizer"]["params"]
    optimizer = unwall.AdamW(model.parameters(), **adamw, max_grad_norm=CONFIG["gradient_clipping"])
    device = next(model.parameters()).device

    batch = CONFIG["train_micro_batch_size_per_gpu"]
    inputs, labels = torch.randn(batch, 64, device=device), torch.randint(8, (batch,), device=device)
    for step in range(10):
        loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
        loss.backward()  # instead of engine.backward(loss)
        optimizer.step()  # instead of engine.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")


def main() -> None:
    if len(sys.argv) > 1:
        print(translate(read(sys.argv[1])))
        return
    translation = translate(CONFIG)  # Plan.from_deepspeed(CONFIG) gives the plan alone, and warns of what it leaves to you
    print(translation)
    print()
    train(translation.plan)


if __name__ == "__main__":
    main()
