"""What ``unwall.plan`` gives is accepted, and keeps its word: ``python -m fuzz.planned --first 0 --count 50``.

Drawn: a model, a batch, precision, options of the planner, and budgets that may be far too small.

What must hold: a refusal that names a budget leads, sooner or later, to a plan; ``unwall.shard`` accepts it; and training as it says
keeps every tier within the plan's budgets.
"""

import dataclasses
import random
import re
from pathlib import Path

import torch
import torch.nn.functional as F

import unwall
from fuzz import keeping as kept
from fuzz.command import Log, Refused, main
from unwall.planner.hardware import Hardware
from unwall.plans import PlanError
from unwall.tiers.sizes import parse_bytes

MACHINE = Hardware(
    name="box", devices_per_node=1, device_bytes=2**33, host_bytes=2**33, disk_bytes=2**33, host_to_device_bytes_per_s=1e10,
    device_to_host_bytes_per_s=1e10, host_memory_bytes_per_s=1e10, disk_read_bytes_per_s=1e9, disk_write_bytes_per_s=1e9,
    matmul_flops_per_s={"float32": 1e11, "bfloat16": 1e11, "float16": 1e11}, is_host=True,
)  # fmt: skip
NAMED = re.compile(r"(device_bytes|host_bytes|disk_bytes)=['\"]?([\d.]+ ?[KMG]?i?B?)")
SEQ = 16
STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    width: int
    blocks: int
    vocabulary: int
    tied: bool
    adapters: bool
    frozen: bool
    options: tuple[tuple[str, object], ...]
    """Of ``unwall.plan``."""
    needs_disk: bool
    budgets: tuple[tuple[str, float], ...]
    """In bytes per parameter."""


def draw(seed):
    rng = random.Random(f"{seed}-planned")
    batch = rng.choice((1, 2, 4, 8))
    options = {
        "batch": batch,
        "compute_dtype": rng.choice((torch.bfloat16, torch.float32, torch.float16)),
        "clip": rng.random() < 0.5,
        "activations": rng.choice((None, "keep", "auto", "recompute", "host")),
        "least_passes": min(batch, rng.choice((1,) * 6 + (2,))),
    }
    if rng.random() < 0.3 and options["compute_dtype"] == torch.bfloat16:
        options["states"] = "lean"
    both = ("device_bytes", "host_bytes")
    return Case(
        width=rng.choice((32, 64)),
        blocks=rng.choice((2, 4, 8)),
        vocabulary=rng.choice((64, 1024)),
        tied=rng.random() < 0.5,
        adapters=rng.random() < 0.3,
        frozen=rng.random() < 0.3,
        options=tuple(options.items()),
        needs_disk=rng.random() < 0.5,
        budgets=tuple(
            (name, rng.choice((0.2, 1, 2, 5, 8, 12, 20))) for name in rng.choice((both, both, both[:1], both[1:], ()))
        ),
    )


def build(case):
    torch.manual_seed(0)
    model = kept.Network(case.width, case.blocks, case.vocabulary, case.tied)
    if case.adapters:
        kept.adapt(model)
    if case.frozen:
        model.blocks[0].requires_grad_(False)
    return model


def plan_of(case, folder, log):
    """With budgets that are raised to what refusals name."""
    model = build(case)
    params = sum(param.numel() for param in model.parameters())
    options = dict(case.options) | {name: int(share * params) for name, share in case.budgets}
    options |= {"disk": folder} if case.needs_disk else {}
    machine = MACHINE if case.needs_disk else dataclasses.replace(MACHINE, disk_bytes=0)
    for _ in range(kept.REFUSALS):
        try:
            return unwall.plan(model, seq=SEQ, hardware=machine, ranks=1, **options)
        except PlanError as refusal:
            log(refusal)
            named = NAMED.search(str(refusal))
            if named is None:
                raise Refused(str(refusal)) from refusal
            options[named[1]], said = named[2], refusal
    raise AssertionError(f"refused {kept.REFUSALS} times, each with what the one before named: {said}")


def train(case, plan, model):
    """As the plan says: so many passes per step, with its share of the batch in each."""
    options = dict(case.options)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = unwall.AdamW(trained, lr=1e-3, max_grad_norm=1.0 if options["clip"] else None)
    samples = max(1, options["batch"] // plan.passes)
    for _ in range(STEPS):
        for _ in range(plan.passes):
            tokens = torch.randint(0, case.vocabulary, (samples, SEQ))
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            (optimizer.scale(loss) if plan.compute_dtype == torch.float16 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(seed, folder, options):
    case, log = draw(seed), Log(folder)
    log(case)
    disk = Path(folder) / "disk"
    disk.mkdir()
    plan = plan_of(case, disk, log).to_plan()
    log(plan)
    model = unwall.shard(build(case), plan)
    train(case, plan, model)
    budgets = {"device": plan.device_bytes, "host": plan.host_bytes, "disk": plan.disk_bytes}
    peaks = {name: tier.peak_bytes for name, tier in unwall.stats(model).tiers.items()}
    return [
        f"{name} held {peaks[name]} bytes, of a budget of {budget_bytes}: {plan}"
        for name, budget_bytes in budgets.items()
        if budget_bytes and peaks.get(name, 0) > parse_bytes(budget_bytes)
    ]


if __name__ == "__main__":
    main("planned", check)
