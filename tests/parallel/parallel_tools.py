"""A small model, its tensor-parallel plans, and what plain PyTorch makes of it."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unwall

WIDTH, VOCABULARY = 32, 64
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
CLIP = 0.3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build():
    torch.manual_seed(0)
    return Net()


def library_model(kind):
    """A small model of ``transformers``: Qwen3 has norms of single heads, and here one matrix for both embeddings."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False}
    more = {"Qwen3": {"head_dim": 8, "tie_word_embeddings": True}, "Mixtral": {"num_local_experts": 4}}.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**sizes, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


def spread(model, mesh, kind):
    """``kind``: plain, sequence-parallel or loss-parallel."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plain = kind == "plain"
    inside = None if plain else Shard(1)
    plan = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=inside)}
    local = kind != "loss"
    plan["head"] = ColwiseParallel(
        input_layouts=inside, output_layouts=Replicate() if local else Shard(-1), use_local_output=local
    )
    for block in range(3):
        plan[f"blocks.{block}.up"] = ColwiseParallel(input_layouts=inside)
        plan[f"blocks.{block}.down"] = RowwiseParallel(output_layouts=inside)
        if not plain:
            plan[f"blocks.{block}.norm"] = SequenceParallel()
    if not plain:
        plan["norm"] = SequenceParallel()
    return parallelize_module(model, mesh, plan)


def batch(step, replica):
    generator = torch.Generator().manual_seed(100 + 7 * step + replica)
    return [torch.randint(VOCABULARY, (4, 8), generator=generator) for _ in range(2)]


def loss_of(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def logits(output):
    return getattr(output, "logits", output)


def train_plain(model, steps, replicas):
    """The model after some steps over the data of all replicas, and the norms of the gradients."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for step in range(steps):
        for replica in range(replicas):
            tokens, target = batch(step, replica)
            (loss_of(logits(model(tokens)), target) / replicas).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def train(model, optimizer, steps, replica, kind="plain"):
    """The same on one rank."""
    from torch.distributed.tensor.parallel import loss_parallel

    norms = []
    for step in range(steps):
        tokens, target = batch(step, replica)
        with loss_parallel() if kind == "loss" else contextlib.nullcontext():
            loss_of(logits(model(tokens)), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.item())
    return norms


def mesh_of(device="cpu", **sizes):
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def made(mesh, kind="plain", model=None, **options):
    """A spread and sharded model, and its optimizer."""
    model = spread(build(), mesh["tp"], kind) if model is None else model
    options = {"compute_dtype": torch.float32, **options}
    unwall.shard(model, unwall.Plan(**options), mesh)
    return model, unwall.AdamW(model.parameters(), **ADAMW, max_grad_norm=CLIP)


def apart(state, reference):
    """How far a state dict (of rank 0, the others' are empty) is from a plain model."""
    if dist.get_rank() > 0:
        assert not state
        return 0.0
    expected = reference.state_dict()
    assert list(state) == list(expected)
    return max((state[name].cpu() - value.cpu()).abs().max().item() for name, value in expected.items())


def norms_apart(norms, expected):
    return max(abs(ours - theirs) for ours, theirs in zip(norms, expected, strict=True))
