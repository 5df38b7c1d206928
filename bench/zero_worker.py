"""One rank of one engine for bench/zero.py: trains the reference workload and prints its row as JSON."""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from workload import SHAPES, Decoder, batch_of, init_weights, init_whole, time_steps
from zero import CLIP

LR = 1e-4


def plain(shape, device, data) -> Callable[[], torch.Tensor]:
    """bf16 compute, fp32 master and AdamW, all by hand."""
    with torch.device("meta"):
        model = Decoder(SHAPES[shape])
    model.to_empty(device=device)
    init_weights(model)
    masters = [param.detach().clone() for param in model.parameters()]
    model.to(torch.bfloat16)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)

    def step() -> torch.Tensor:
        loss = model(*data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        return loss.detach()

    return step


def fsdp2(shape, device, data) -> Callable[[], torch.Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device("meta"):
        model = Decoder(SHAPES[shape])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    init_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> torch.Tensor:
        loss = model(*data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


PLANS = {
    "unwall": {},
    "unwall-host": {"params": "host", "optimizer": "host", "device_bytes": "9GiB"},
    "unwall-host-noclip": {"params": "host", "optimizer": "host", "device_bytes": "9GiB"},
    "unwall-auto40": {"device_bytes": "40GiB"},
}


def unwall_engine(engine, shape, device, data) -> Callable[[], torch.Tensor]:
    import unwall

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(SHAPES[shape])
    unwall.shard(model, unwall.Plan(**PLANS[engine]))
    start = time.perf_counter()
    init_whole(model, unwall.full_params)
    clip = None if engine.endswith("noclip") else CLIP
    optimizer = unwall.AdamW(model.parameters(), lr=LR, max_grad_norm=clip)
    print(f"filled in {time.perf_counter() - start:.1f} s", file=sys.stderr)

    def step() -> torch.Tensor:
        loss = model(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    engine, shape, batch, seq, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    world = int(os.environ["WORLD_SIZE"])
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1 or engine == "fsdp2":
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = batch_of(SHAPES[shape], batch, seq, device, seed=rank)
    start = time.perf_counter()
    step = {"plain": plain, "fsdp2": fsdp2}.get(engine, functools.partial(unwall_engine, engine))(shape, device, data)
    built_s = time.perf_counter() - start
    timing = time_steps(step, steps, warm=2, device=device)
    row = {
        "step_s": timing.step_s,
        "tokens_s": world * batch * seq / timing.step_s,
        "tflops": SHAPES[shape].flops(batch, seq) / timing.step_s / 1e12,
        "device_gib": timing.device_gib,
        "host_gib": timing.host_gib,
        "first_s": timing.first_s,
        "losses": timing.losses,
        "build_s": built_s,
    }
    print(json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
