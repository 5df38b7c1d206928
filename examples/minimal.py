"""The smallest training loop: one call makes the model unwall's, the loop stays plain PyTorch.

Run it:  python examples/minimal.py
"""

import torch

import unwall


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))  # any nn.Module
    unwall.shard(model)  # in place; on the accelerator if there is one
    optimizer = unwall.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    device = next(model.parameters()).device

    inputs, labels = torch.randn(32, 64, device=device), torch.randint(8, (32,), device=device)
    for step in range(20):
        loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
