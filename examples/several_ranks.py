"""Several ranks: parameters, gradients and optimizer states are cut over them (ZeRO stage 3).

With accelerators there is one rank per device, over NCCL; without, the ranks are processes on the CPU, over gloo.

Run it:  torchrun --nproc-per-node 2 examples/several_ranks.py
"""

import os

import torch
import torch.distributed as dist

import unwall


def join() -> None:
    """Makes this process one of the ranks that torchrun started. Before ``unwall.shard``."""
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 2 examples/several_ranks.py")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def main() -> None:
    join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # each rank has its own data; the model starts from rank 0's values everywhere
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 8))
    unwall.shard(model, unwall.Plan(stage=3))
    optimizer = unwall.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    device = next(model.parameters()).device

    inputs, labels = torch.randn(32, 64, device=device), torch.randint(8, (32,), device=device)
    for step in range(10):
        loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
        loss.backward()  # gradients are averaged over the ranks
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if rank == 0 and step % 3 == 0:
            print(f"step {step + 1}: mean loss of {world_size} ranks {mean.item():.3f}", flush=True)

    stats = unwall.stats(model)
    if rank == 0:
        print(f"\nrank 0 of {world_size}:\n{stats}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
