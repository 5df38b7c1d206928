"""What this machine reaches: small measurements, each the best of a few rounds (others may be using the machine)."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from unwall.native.disk import DiskEngine
from unwall.native.memory import HostMemory
from unwall.native.pool import AdamWStep, DType, WorkerPool
from unwall.planner.formulas import SPLIT_UPDATE_TRAFFIC_BYTES

ROUNDS = 7
LIMIT_S = 0.3
"""For all rounds of one measurement."""
HEAT_S = 1.5
"""How long an accelerator is kept busy before it is timed."""
COPY_BYTES = 128 << 20
AT_ONCE = 8
"""Collectives that share ``COPY_BYTES`` on a host."""
UPDATE_NUMEL = 6 << 20
"""Parameters per thread: 14 bytes each, far more than its share of the caches."""
DISK_BYTES = 256 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def best_s(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS, limit_s: float = LIMIT_S) -> float:
    """Seconds of the fastest of some rounds, after one that does not count. Past ``limit_s`` no further round begins."""
    return best_each([work], device, rounds, limit_s)[0]


def best_each(works: Sequence[Callable[[], object]], device: torch.device, rounds: int, limit_s: float) -> list[float]:
    """The same for several, in turn: what disturbs the machine for a while disturbs all of them."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    found: list[list[float]] = []
    begin = time.perf_counter()
    while len(found) < 2 or (len(found) <= rounds and time.perf_counter() - begin < limit_s):
        row = []
        for work in works:
            wait()
            start = time.perf_counter()
            work()
            wait()
            row.append(time.perf_counter() - start)
        found.append(row)
    return [min(column) for column in zip(*found[1:], strict=True)]


def steady_each(works: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of each work when an accelerator has been busy with the last of them for a while: under load its clocks fall,
    and a step of training is all load."""
    _mean_s(works[-1], device, HEAT_S)
    return [_mean_s(work, device, LIMIT_S) for work in reversed(works)][::-1]


def _mean_s(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Over as many rounds as ``seconds`` hold, without a pause between them."""
    work()
    torch.cuda.synchronize(device)
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(4):
            work()
        torch.cuda.synchronize(device)
        rounds += 4
    return (time.perf_counter() - start) / rounds


def copies(device: torch.device) -> tuple[float, float, float]:
    """Bytes per second host to device, device to host, both at once in all. Without an accelerator: between memories, as the
    engine copies there, one thread each way."""
    if device.type == "cuda":
        return _device_copies(device)
    with WorkerPool(1) as there, WorkerPool(1) as back:
        memory = [HostMemory(COPY_BYTES, there) for _ in range(4)]

        def send(*pools: WorkerPool) -> None:
            tickets = [
                pool.copy(memory[2 * at].address, memory[2 * at + 1].address, COPY_BYTES) for at, pool in enumerate(pools)
            ]
            for ticket in tickets:
                ticket.wait()

        one = COPY_BYTES / best_s(lambda: send(there), device)
        other = COPY_BYTES / best_s(lambda: send(back), device)
        return one, other, 2 * COPY_BYTES / best_s(lambda: send(there, back), device)


def _device_copies(device: torch.device) -> tuple[float, float, float]:
    host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    held = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def move(*ways: int) -> None:
        for at in ways:
            with torch.cuda.stream(streams[at]):
                (held[0] if at == 0 else host[1]).copy_(host[0] if at == 0 else held[1], non_blocking=True)

    there, back, both = (best_s(lambda ways=ways: move(*ways), device) for ways in ((0,), (1,), (0, 1)))  # type: ignore[misc]
    return COPY_BYTES / there, COPY_BYTES / back, 2 * COPY_BYTES / both


def update_rate(threads: int) -> float:
    """Bytes per second of host memory under the update kernel, on all threads."""
    numel = UPDATE_NUMEL * threads
    with WorkerPool(threads) as pool:
        sizes = {"param": 2, "remainder": 2, "exp_avg": 4, "exp_avg_sq": 4, "grad": 2}
        held = {name: HostMemory(size * numel, pool) for name, size in sizes.items()}
        at = {name: memory.address for name, memory in held.items()}
        step = AdamWStep(lr=1e-3, step=1)

        def work() -> None:
            pool.adamw(
                at["param"], at["exp_avg"], at["exp_avg_sq"], at["grad"], numel, step, grad_dtype=DType.BF16,
                remainder=at["remainder"],
            ).wait()  # fmt: skip

        return SPLIT_UPDATE_TRAFFIC_BYTES * numel / best_s(work, torch.device("cpu"))


def device_memory_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of an accelerator's own memory."""
    one, other = (torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * one.numel() / best_s(lambda: one.copy_(other), device)


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float | None:
    """FLOPs per second of square products, the best of two sizes. None where the device does not multiply in this dtype."""
    small, large = (1024, 8192) if device.type == "cuda" else (256, 1024)
    try:
        first = _product_s(small, dtype, device)
        slow = first * (large / small) ** 3 > 4 * LIMIT_S  # a dtype that is only emulated
        second = 0.0 if slow else 2 * large**3 / _product_s(large, dtype, device)
        return max(2 * small**3 / first, second)
    except RuntimeError:
        return None


def _product_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return best_s(lambda: one @ other, device, 3 * ROUNDS)


class _Block(nn.Module):
    """Attention and a gated feed-forward: what the planner takes a block to be."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: batch, time, width
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        narrow: torch.Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + narrow


def block_rate(dtype: torch.dtype, device: torch.device) -> tuple[float, float] | None:
    """(FLOPs per second, seconds per parameter and forward beside that) of training a transformer block.

    Two batches are timed, and a straight line is laid through them.
    """
    width, inner, seq, batches = (4096, 11008, 2048, (1, 4)) if device.type == "cuda" else (512, 1408, 128, (1, 4))
    layers = 2
    try:
        with device:  # 400 million random numbers take seconds on one core
            model = nn.Sequential(*(_Block(width, inner, width // 64) for _ in range(layers))).to(dtype)
        inputs = [torch.randn(batch, seq, width, device=device, dtype=dtype) for batch in batches]
        works = [lambda x=x: model(x).sum().backward() for x in inputs]
        on_host = device.type != "cuda"
        times = best_each(works, device, 10 * ROUNDS, 4 * LIMIT_S) if on_host else steady_each(works, device)
    except RuntimeError:
        return None
    numel = sum(param.numel() for param in model.parameters())
    sample = 3 * layers * seq * (2 * (4 * width**2 + 3 * width * inner) + 2 * width * seq)
    rate = sample * (batches[1] - batches[0]) / max(times[1] - times[0], 1e-9)
    rate = min(rate, 1.5 * sample * batches[1] / times[1])  # a straight line that noise has tilted
    return rate, max(0.0, (times[1] - sample * batches[1] / rate) / (3 * numel))


def disk_rates(directory: Path) -> tuple[float, float, float]:
    """Bytes per second read, written, and both at once in all. OSError where the directory cannot be written."""
    with tempfile.TemporaryDirectory(prefix="unwall-probe-", dir=directory) as folder, DiskEngine() as engine:
        memory = [HostMemory(DISK_BYTES // 2) for _ in range(2)]
        files = [engine.open(Path(folder) / name, DISK_BYTES) for name in ("one", "two")]
        half = DISK_BYTES // 2
        here = torch.device("cpu")

        def write(at: int) -> None:
            tickets = [files[at].write(place, memory[at].address, half) for place in (0, half)]
            for ticket in tickets:
                ticket.wait()

        def read(at: int) -> None:
            tickets = [files[at].read(place, memory[at].address, half) for place in (0, half)]
            for ticket in tickets:
                ticket.wait()

        def both() -> None:
            tickets = [files[0].read(0, memory[0].address, half), files[1].write(0, memory[1].address, half)]
            for ticket in tickets:
                ticket.wait()

        written = DISK_BYTES / best_s(lambda: write(0), here)
        write(1)
        return DISK_BYTES / best_s(lambda: read(0), here), written, DISK_BYTES / best_s(both, here)


def collective_rate(device: torch.device) -> float:
    """Bytes per second that each rank sends in all-gathers. Zero where there is one rank. All ranks call it together.

    As a step does it: on a host some of them are on their way at once, because gloo leaves a link idle in between where there
    is only one. How many rounds there are is the same for all ranks, or one would wait for another that has stopped."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return 0.0
    ranks, at_once = dist.get_world_size(), 1 if device.type == "cuda" else AT_ONCE
    parts = [torch.zeros(COPY_BYTES // 4 // ranks // at_once, device=device) for _ in range(at_once)]
    wholes = [torch.zeros(part.numel() * ranks, device=device) for part in parts]
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def work() -> None:
        for each in [call(whole, part, async_op=True) for whole, part in zip(wholes, parts, strict=True)]:
            each.wait()

    rounds = torch.tensor([min(ROUNDS, max(1, int(LIMIT_S / best_s(work, device, rounds=1, limit_s=0.0))))], device=device)
    dist.broadcast(rounds, 0)
    seconds = best_s(work, device, rounds=int(rounds), limit_s=float("inf"))
    return 4 * sum(whole.numel() for whole in wholes) * (ranks - 1) / ranks / seconds
