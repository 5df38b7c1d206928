"""Three dimensions: a pipeline of two stages, tensor parallelism inside each, ZeRO over the rest.

The model is built alike everywhere; each rank keeps its layers. The checkpoint at the end is one of the whole model: any other
mesh loads it, one process too, and ``unwall export`` makes files of weights from it.

Run it:  torchrun --nproc-per-node 8 examples/three_dimensions.py     (a multiple of four)
"""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import unwall

STAGES, TENSOR_RANKS, MICROBATCHES = 2, 2, 4


def join() -> None:
    """Makes this process one of the ranks that torchrun started."""
    if "RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc-per-node 8 examples/three_dimensions.py")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, tie_word_embeddings=False))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of one microbatch."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    replicas = dist.get_world_size() // (STAGES * TENSOR_RANKS)
    mesh = init_device_mesh(device, (STAGES, replicas, TENSOR_RANKS), mesh_dim_names=("pp", "dp", "tp"))
    model = unwall.parallelize(build().to(device), mesh)
    part, schedule = unwall.pipeline(model, unwall.Plan(), mesh=mesh, microbatches=MICROBATCHES, loss=loss_of)
    optimizer = unwall.AdamW(part.parameters(), lr=1e-2, max_grad_norm=1.0)

    first, last = mesh.get_local_rank("pp") == 0, mesh.get_local_rank("pp") == STAGES - 1
    torch.manual_seed(mesh.get_local_rank("dp"))  # stages and tensor ranks of one replica have the same batch
    tokens = torch.randint(256, (8, 32), device=device)
    for step in range(12):
        losses: list[torch.Tensor] = []
        schedule.step(*([tokens] if first else []), **({"target": tokens, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if last and mesh.get_local_rank("dp") == mesh.get_local_rank("tp") == 0 and step % 3 == 0:
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.3f}", flush=True)

    # A directory that all ranks share; here one that goes again.
    folder = [tempfile.mkdtemp(prefix="unwall-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path, stats = unwall.save(folder[0], part, optimizer), unwall.stats(part)
    if dist.get_rank() == 0:
        print(f"\na checkpoint of all stages: {path}\nrank 0, the first stage:\n{stats}", flush=True)
        shutil.rmtree(folder[0])


if __name__ == "__main__":
    join()
    main()
    dist.destroy_process_group()
