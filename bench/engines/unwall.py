"""unwall. Options behind the name are fields of ``unwall.Plan``; those in ``_OPTIMIZER`` go to ``unwall.AdamW``, those in
``VARIANTS`` to the workload."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.engines import Job, Running, require, version_of
from bench.workload import ADAMW, VARIANTS, build, initial

_OPTIMIZER = ("update_in_backward", "speculate")


def start(job: Job) -> Running:
    unwall = require("unwall")
    variant = {name: value for name, value in job.options.items() if name in VARIANTS}
    options, extra = plan_fields({k: v for k, v in job.options.items() if k not in VARIANTS}, job.scratch)
    model = build(job.shape, "meta", variant)
    unwall.shard(model, unwall.Plan(**options))
    _fill(model)
    optimizer = unwall.AdamW(model.parameters(), max_grad_norm=job.clip, **ADAMW, **extra)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*job.data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def written_bytes() -> int | None:
        counted = [link.moved_bytes for name, link in unwall.stats(model).links.items() if name.endswith(">disk")]
        return sum(counted) if counted else None  # no such link: the kernel's count is shown

    def profile(path: Path) -> None:
        with unwall.profile(model) as seen:
            for _ in range(3):
                step()
        seen.save_picture(f"{path}.svg", f"{path.name}: three steps")  # not with_suffix: names have dots in them
        seen.save_trace(f"{path}.json")

    return Running(
        step=step, version=version_of("unwall"), written_bytes=written_bytes, profile=profile, finish=lambda: _finish(model)
    )


def plan_fields(given: Mapping[str, str], scratch: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of ``unwall.Plan`` and those of ``unwall.AdamW`` that an engine's options mean."""
    options = {name: _value(text) for name, text in given.items()}
    optimizer = {name: options.pop(name) for name in _OPTIMIZER if name in options}
    if "update_in_backward" in optimizer:
        optimizer["update_in_backward"] = bool(optimizer["update_in_backward"])  # 1 and 0 too
    if options.get("disk") == "scratch":
        options["disk"] = scratch
        if not {"device_bytes", "host_bytes", "params", "optimizer"} & options.keys():
            options |= {"params": "disk", "optimizer": "disk"}  # with budgets: what they leave over goes to disk
    return options, optimizer


def _fill(model: torch.nn.Module) -> None:
    """The first weights, one module at a time."""
    import unwall

    names = {param: name for name, param in model.named_parameters()}
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            with unwall.full_params(module, write=True), torch.no_grad():
                for param in own:
                    param.copy_(initial(names[param], param.shape, param.device))


def _finish(model: torch.nn.Module) -> None:
    """Every way of looking at a model waits for its update; this one is the cheapest."""
    import unwall

    unwall.stats(model)


def _value(text: str) -> Any:
    """An option as Python: a number, None, a torch dtype, or the text itself (sizes such as 9GiB stay text)."""
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    if text.isdecimal():
        return int(text)
    found = getattr(torch, text, None)
    return found if isinstance(found, torch.dtype) else text
