"""Buffers that a model built on the meta device has no values for.

Those that are saved come with the state dict, as parameters do. Those that are not (tables of a rotary embedding, position
ids) are computed in constructors, and nobody can run one again. transformers' models can fill them: that is used. Any other is
named.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def fill_meta_buffers(model: nn.Module) -> dict[object, str]:
    """Gives buffers on the meta device memory, and values where no state dict will. ValueError names those without.

    Returns the names of those that a state dict has to give values, by module (its id) and name in it."""
    empty: list[str] = []
    for name, module, fill in _modules(model):
        lost = [own for own in _on_meta(module) if own in module._non_persistent_buffers_set]
        for own in lost:
            module._buffers[own] = _real(module, own)
        if lost and (fill is None or not _filled(module, lost, fill)):
            empty += [f"{name}.{own}" if name else own for own in lost]
            for own in lost:  # as it was, for another try
                module._buffers[own] = _real(module, own).to("meta")
    if empty:
        raise ValueError(
            f"{', '.join(empty)} are buffers on the meta device that no state dict holds, so they would never get values: "
            "build the model inside unwall.init() instead, or set them to tensors on the CPU before unwall.shard"
        )
    waiting: dict[object, str] = {}
    for name, module in model.named_modules():
        for own in _on_meta(module):
            module._buffers[own] = _real(module, own)
            waiting[id(module), own] = f"{name}.{own}" if name else own
    return waiting


def _on_meta(module: nn.Module) -> list[str]:
    return [own for own, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]


def _real(module: nn.Module, own: str) -> torch.Tensor:
    buffer = module._buffers[own]
    assert buffer is not None
    return torch.zeros_like(buffer, device="cpu")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Callable[[nn.Module], Any] | None]]:
    """Every module with its name, and what its model fills modules with, if it has such a function."""
    fills = {name: getattr(module, "_init_weights", None) for name, module in model.named_modules()}
    for name, module in model.named_modules():
        parts = name.split(".") if name else []
        paths = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
        yield name, module, next((fills[path] for path in paths if callable(fills.get(path))), None)


def _filled(module: nn.Module, names: list[str], fill: Callable[[nn.Module], Any]) -> bool:
    """Whether ``fill`` gives the buffers values: the same, whatever was in them before."""
    found: list[list[torch.Tensor]] = []
    for value in (0, 1):
        for own in names:
            buffer = module._buffers[own]
            assert buffer is not None
            module._buffers[own] = torch.full_like(buffer, value)
        with torch.no_grad():
            fill(module)
        found.append([buffer for own in names if (buffer := module._buffers[own]) is not None])
    return all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def never_loaded(names: list[str]) -> str:
    """What to do about parameters and buffers that came from the meta device, and that nothing was written to."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"{', '.join(names[:5])}{more} came from the meta device and have no values yet: load them with "
        "model.load_state_dict(...), or write them inside unwall.full_params(model, write=True), before the model runs"
    )
