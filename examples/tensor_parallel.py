"""Tensor parallelism inside a node: layers are cut over pairs of ranks, and what each holds over the pairs (ZeRO stage 3).

A transformers model brings its own plan of which weights are cut by rows or columns. Of the inputs of recomputed blocks each
tensor rank keeps its part.

Run it:  torchrun --nproc-per-node 4 examples/tensor_parallel.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import unwall

TENSOR_RANKS = 2


def join() -> None:
    """Makes this process one of the ranks that torchrun started."""
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 4 examples/tensor_parallel.py")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def build() -> LlamaForCausalLM:
    """A small Llama. A real one: ``unwall.from_pretrained(folder, plan, mesh)`` does this and the next two steps."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs = dist.get_world_size() // TENSOR_RANKS
    mesh = init_device_mesh(device, (pairs, TENSOR_RANKS), mesh_dim_names=("dp", "tp"))
    model = build().to(device).train()
    unwall.parallelize(model, mesh)
    plan = unwall.Plan(stage=3, activations="recompute", partition_activations=True)
    unwall.shard(model, plan, mesh)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)

    torch.manual_seed(mesh.get_local_rank("dp"))  # ranks along 'tp' see the same batch
    tokens = torch.randint(256, (4, 32), device=device)
    for step in range(12):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 3 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    stats = unwall.stats(model)
    if dist.get_rank() == 0:
        print(f"\nrank 0 of {dist.get_world_size()}:\n{stats}", flush=True)


if __name__ == "__main__":
    join()
    main()
    dist.destroy_process_group()
