"""The demo: a byte-level language model learns unwall's own source files, with an eighth of its states' bytes on the device.

The same model is trained by plain PyTorch beside it, on the same batches: both losses are in the report.
"""

import copy
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from unwall._version import __version__
from unwall.api import engine, profile, shard, stats
from unwall.optim.adamw import AdamW
from unwall.plans import Plan, PlanError
from unwall.report.page import write_report
from unwall.report.run import LOG, PROFILE, RUN
from unwall.tiers.device import default_device
from unwall.tiers.ledger import BudgetError
from unwall.tiers.sizes import format_bytes
from unwall.train.live import LiveLine
from unwall.train.log import Log
from unwall.train.meters import Meters

STATE_BYTES = 16
"""Per parameter in fp32: value, gradient and two moments."""
DEVICE_SHARE, HOST_SHARE = 8, 2
"""The states are so many times what the device may hold, and the host."""
PROFILED_STEP = 3
RATE, CLIP = 1e-3, 1.0


class DemoBlock(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: batch, time, width
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        narrow: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + narrow


class ByteModel(nn.Module):
    """A decoder over bytes. Plain PyTorch: it knows nothing of unwall."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.context = context
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(DemoBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the demo. The default takes well under a minute on two cores."""

    width: int = 256
    layers: int = 6
    heads: int = 4
    context: int = 128
    batch: int = 8


@dataclass(frozen=True)
class Result:
    """What the demo found."""

    losses: list[float]
    plain_losses: list[float]
    states_bytes: int
    peak_bytes: dict[str, int]
    """Per tier."""
    report: Path


def source_bytes() -> torch.Tensor:
    """The library's own Python files, end to end."""
    text = b"\n".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def run(steps: int, out: str | Path, size: Size | None = None, *, predicts: bool = True) -> Result:
    """Trains, prints and writes the report into ``out``. ``predicts``: the planner is asked first, which takes seconds."""
    size, out = size or Size(), Path(out)
    _make(out)
    device = default_device()
    torch.manual_seed(0)
    model = ByteModel(size.width, size.layers, size.heads, size.context)
    plain = copy.deepcopy(model).to(device)
    params = sum(param.numel() for param in model.parameters())
    line = LiveLine(steps, silent=False)
    try:
        with _drive(out) as disk:
            states = STATE_BYTES * params
            plan = Plan(
                device_bytes=states // DEVICE_SHARE, host_bytes=states // HOST_SHARE, disk=disk, compute_dtype=torch.float32
            )
            found = _said(model, plan, size, steps, params, device, predicts)
            line.say(str(found["answer"]))
            result = _train(model, plain, plan, size, steps, out, line, found)
    finally:
        line.close()
    for words in _last_words(result):
        print(words)
    return result


def _train(
    model: ByteModel, plain: ByteModel, plan: Plan, size: Size, steps: int, out: Path, line: LiveLine, said: dict[str, Any]
) -> Result:
    """Both models on the same batches, step by step."""
    shard(model, plan)
    optimizer = AdamW(model.parameters(), lr=RATE, max_grad_norm=CLIP)
    other = torch.optim.AdamW(plain.parameters(), lr=RATE)
    owner, device, data = engine(model), next(plain.parameters()).device, source_bytes()
    meters, log, losses, beside = Meters(owner), Log(out / LOG, 0, None), [], []
    bound = (said["prediction"] or {}).get("bound_s")
    for step in range(1, steps + 1):
        at = torch.randint(len(data) - size.context - 1, (size.batch,))
        rows = torch.stack([data[start : start + size.context + 1] for start in at.tolist()]).to(device)
        beside.append(_plain_step(plain, other, rows))
        meters.start()
        if step == PROFILED_STEP:
            with profile(model) as recorded:
                losses.append(_step(model, optimizer, rows))
            recorded.save_trace(out / PROFILE)
        else:
            losses.append(_step(model, optimizer, rows))
        reading, tokens = meters.read(), size.batch * size.context
        assert optimizer.grad_norm is not None
        entry = {
            "kind": "step", "step": step, "loss": losses[-1], "plain_loss": beside[-1], "lr": RATE,
            "grad_norm": float(optimizer.grad_norm), "tokens": tokens, "seconds": reading.seconds,
            "tokens_per_second": tokens / reading.seconds,
            "bound_fraction": None if bound is None else bound / reading.seconds,
            "live_bytes": reading.live_bytes, "peak_bytes": reading.peak_bytes, "stall_seconds": reading.stall_seconds,
        }  # fmt: skip
        log.add(entry | ({"profiled": True} if step == PROFILED_STEP else {}))
        line.show(entry)
    log.close()
    peaks = {str(name): tier.peak_bytes for name, tier in stats(model).tiers.items()}
    _write(out / RUN, said | {"status": "finished"})
    states = STATE_BYTES * int(said["model"]["params"])
    return Result(losses, beside, states, peaks, write_report(out))


def _step(model: ByteModel, optimizer: AdamW, rows: torch.Tensor) -> float:
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _plain_step(model: ByteModel, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> float:
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _said(
    model: ByteModel, plan: Plan, size: Size, steps: int, params: int, device: torch.device, predicts: bool
) -> dict[str, Any]:
    """run.json, as ``unwall train`` writes it."""
    assert isinstance(plan.device_bytes, int)
    assert isinstance(plan.host_bytes, int)
    budgets = {"device_bytes": plan.device_bytes, "host_bytes": plan.host_bytes}
    prediction, machine = _prediction(model, plan, size) if predicts else (None, None)
    answer = (
        f"{params / 1e6:.1f} M parameters, {format_bytes(STATE_BYTES * params)} of states on {device}; allowed: device "
        f"{format_bytes(plan.device_bytes)}, host {format_bytes(plan.host_bytes)}, the rest on disk"
    )
    return {
        "version": 1, "status": "running", "command": ["unwall", "demo"], "steps": steps, "ranks": 1, "passes": 1,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()), "answer": answer, "plan": budgets,
        "prediction": prediction, "machine": machine, "options": dict(vars(size)),
        "model": {"name": "unwall demo: a byte model on its own sources", "params": params, "trainable": params},
        "versions": {"unwall": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }  # fmt: skip


def _prediction(model: ByteModel, plan: Plan, size: Size) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The planner's prediction and the machine, measured once. None where it cannot say."""
    from unwall.planner.job import Workload, make_job  # a demo without a prediction needs none of it
    from unwall.planner.outline import outline_of
    from unwall.planner.predict import predict
    from unwall.planner.public import machine_of

    try:
        machine, _ = machine_of(None, 1, plan.directories[0], None, torch.float32)
        load = Workload(batch=size.batch, seq=size.context, clip=True)
        job = make_job(outline_of(model), plan, 1, load, plan.budget_device_bytes or 0, plan.budget_host_bytes)
        return predict(job, machine).to_dict(), machine.to_dict()
    except (BudgetError, PlanError, ValueError, RuntimeError, OSError):
        return None, None


def _last_words(result: Result) -> Iterator[str]:
    apart = max(abs(ours - theirs) for ours, theirs in zip(result.losses, result.plain_losses, strict=True))
    yield f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}; plain PyTorch's is at most {apart:.1e} away from it"
    yield f"{'bytes per tier, at most':24}{'device':>12}{'host':>12}{'disk':>12}"
    yield f"{'plain PyTorch':24}{format_bytes(result.states_bytes):>12}{'':>12}{'':>12}"
    yield f"{'unwall':24}" + "".join(f"{format_bytes(result.peak_bytes.get(t, 0)):>12}" for t in ("device", "host", "disk"))
    yield f"report: {result.report}"


def _make(out: Path) -> None:
    """The directory; what an earlier demo left there goes. ValueError where it holds something else."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / RUN).is_file())):
        raise ValueError(f"--out {out}: holds something that is not of a run; choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    for name in (LOG, PROFILE):
        (out / name).unlink(missing_ok=True)
    _write(out / RUN, {"version": 1, "status": "running"})


def _write(path: Path, said: dict[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=1, default=str) + "\n")


@contextmanager
def _drive(out: Path) -> Iterator[Path]:
    """A place for the disk tier, which goes again."""
    folder = Path(tempfile.mkdtemp(prefix="tier-", dir=out))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
