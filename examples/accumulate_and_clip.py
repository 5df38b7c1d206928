"""Gradient accumulation, clipping and a learning-rate schedule, each as in plain PyTorch.

``Plan(passes=4)`` makes room for the sum of four backward calls; ``no_sync`` saves the communication of all but the last of
them; ``max_grad_norm`` clips over all ranks; any ``torch.optim.lr_scheduler`` takes the optimizer.

Run it:  python examples/accumulate_and_clip.py        (or with torchrun, as several_ranks.py)
"""

import contextlib

import torch

import unwall

PASSES, STEPS = 4, 8


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    unwall.shard(model, unwall.Plan(passes=PASSES))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    device = next(model.parameters()).device

    batches = [(torch.randn(16, 64, device=device), torch.randint(8, (16,), device=device)) for _ in range(PASSES)]
    for step in range(STEPS):
        total = 0.0
        for number, (inputs, labels) in enumerate(batches):
            last = number == PASSES - 1
            with contextlib.nullcontext() if last else unwall.no_sync(model):
                loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels) / PASSES
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        print(f"step {step + 1}: loss {total:.3f}, gradient norm {float(optimizer.grad_norm):.3f}, lr {rate:.1e}")


if __name__ == "__main__":
    main()
