"""A loop with what loops collect over time: two learning rates, warm-up, accumulation, an average of the weights, evaluation
with it, gradient norms by layer, checkpoints that are written beside the training.

Run it:  python examples/custom_loop.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import unwall

ACCUMULATE = 2


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(32, 16, device=device)
    return inputs, inputs.flip(1).sin()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
    unwall.shard(model, unwall.Plan(params="host", optimizer="host", compute_dtype=torch.float32, passes=ACCUMULATE))
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim <= 1]
    optimizer = unwall.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-3}], lr=5e-3
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    average = unwall.ema(model, decay=0.9)
    device = next(model.parameters()).device

    with tempfile.TemporaryDirectory() as scratch:
        for step in range(40):
            for _ in range(ACCUMULATE):
                inputs, wanted = batch(device)
                loss = nn.functional.mse_loss(model(inputs), wanted) / ACCUMULATE
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            first = unwall.grads(model)["0.weight"].norm()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update()
            if step % 10 == 9:
                with average.swap(), torch.no_grad():  # the average in place of the weights
                    model.eval()
                    inputs, wanted = batch(device)
                    held_out = nn.functional.mse_loss(model(inputs), wanted)
                    model.train()
                print(f"step {step + 1}: loss {held_out.item():.4f} norm {norm:.3f} first layer {first:.3f}")
                state = {"step": step + 1, "scheduler": scheduler.state_dict()}
                unwall.save(Path(scratch) / "run", model, optimizer, extra=state, keep=2, block=False)
        print(f"resumes after step {unwall.load(Path(scratch) / 'run', model, optimizer)['step']}")


if __name__ == "__main__":
    main()
