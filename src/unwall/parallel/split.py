"""A model cut into pipeline stages: which layers each stage runs, and the modules that run them.

[Note: identities]
A stage is the model with identity modules in the place of other stages' layers. So names and numbers of layers stay what they
were, and a state dict of a stage is a part of the model's. Where a rank runs several stages, each is a shallow copy of the
containers: the layers themselves are the same objects.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Elsewhere(nn.Module):
    """In the place of a layer that another stage runs."""

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        return x


@dataclass(frozen=True)
class Cut:
    """A model that can be cut: its layers in order, and what runs before and after them."""

    layers: list[tuple[str, nn.Module]]
    """By their names in the model."""
    before: tuple[str, ...] = ()
    """Modules of the first stage."""
    after: tuple[str, ...] = ()
    """Modules of the last stage."""
    decoder: bool = False
    """A ``transformers`` decoder. Otherwise an ``nn.Sequential``."""


def cut_of(model: nn.Module) -> Cut:
    """ValueError for a model that cannot be cut."""
    if isinstance(model, nn.Sequential):
        return Cut(list(model.named_children()))
    base = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    layers = getattr(base, "layers", None)
    if isinstance(base, nn.Module) and isinstance(layers, nn.ModuleList) and hasattr(model, "lm_head"):
        path = next(name for name, module in model.named_children() if module is base)
        if isinstance(getattr(base, "embed_tokens", None), nn.Module) and isinstance(getattr(base, "norm", None), nn.Module):
            named = [(f"{path}.layers.{number}", layer) for number, layer in enumerate(layers)]
            return Cut(named, (f"{path}.embed_tokens",), (f"{path}.norm", "lm_head"), decoder=True)
    raise ValueError(
        f"{type(model).__name__} cannot be cut into stages: nn.Sequential can, and decoders of transformers (embed_tokens, "
        "layers, norm, lm_head). For another model build the stages by hand with torch.distributed.pipelining, and shard each "
        "rank's module with unwall.shard"
    )


def counts_of(model: nn.Module, cut: Cut, stages: int, split: Sequence[int] | None) -> list[int]:
    """How many layers each stage runs. ``split`` says it, otherwise the largest cost of a stage is as small as it can be."""
    if stages > len(cut.layers):
        raise ValueError(
            f"{stages} stages, but {type(model).__name__} has {len(cut.layers)} layers: each stage needs one. Use fewer "
            "pipeline ranks, or a schedule with one stage per rank"
        )
    if split is not None:
        listed = list(split) if isinstance(split, Sequence) else []
        whole = all(isinstance(count, int) and not isinstance(count, bool) for count in listed)
        if not whole or len(listed) != stages or sum(listed) != len(cut.layers) or min(listed) < 1:
            raise ValueError(
                f"split={split!r}: expected {stages} whole numbers of at least 1 that add up to the {len(cut.layers)} layers"
            )
        return listed
    costs = [float(_cost(layer)) for _, layer in cut.layers]
    costs[-1] += sum(_cost(model.get_submodule(name)) for name in cut.after)
    return _balanced(costs, stages)


def _cost(module: nn.Module) -> int:
    """Of one token's forward: a multiplication and an addition for each element of a matrix."""
    return sum(param.numel() for param in module.parameters() if param.dim() > 1) + 1


def _balanced(costs: list[float], stages: int) -> list[int]:
    """Runs of neighbours, the largest sum as small as it can be."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[list[tuple[float, int]]] = [[(total, 0) for total in sums]]
    for stage in range(1, stages):
        row = []
        for end in range(len(sums)):
            starts = range(stage, end)
            row.append(min(((max(best[-1][at][0], sums[end] - sums[at]), at) for at in starts), default=(float("inf"), 0)))
        best.append(row)
    counts, end = [], len(costs)
    for stage in reversed(range(stages)):
        start = best[stage][end][1] if stage else 0
        counts.append(end - start)
        end = start
    return counts[::-1]


def refuse_tied(model: nn.Module, cut: Cut, counts: list[int]) -> None:
    """ValueError where two stages would hold the same parameter."""
    holders: dict[int, tuple[int, str]] = {}
    for stage in range(len(counts)):
        for name in _held_by(cut, counts, stage):
            for own, param in model.get_submodule(name).named_parameters(remove_duplicate=False):
                known = holders.setdefault(id(param), (stage, f"{name}.{own}"))
                if known[0] != stage:
                    raise ValueError(
                        f"{known[1]} and {name}.{own} are one parameter, and would be in stages {known[0]} and {stage}: untie "
                        "them (tie_word_embeddings=False), or leave the 'pp' dimension out"
                    )


def _held_by(cut: Cut, counts: list[int], stage: int) -> list[str]:
    low = sum(counts[:stage])
    names = [name for name, _ in cut.layers[low : low + counts[stage]]]
    return [*(cut.before if stage == 0 else ()), *names, *(cut.after if stage == len(counts) - 1 else ())]


@contextmanager
def keep_only(model: nn.Module, cut: Cut, counts: list[int], stages: Sequence[int]) -> Iterator[nn.Module]:
    """The model without the layers of other stages than these, in place. Where what is done inside fails, they come back."""
    kept = {name for stage in stages for name in _held_by(cut, counts, stage)}
    replaced = _put_elsewhere(model, cut, kept)
    try:
        yield model
    except BaseException:
        for name, module in replaced.items():
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._modules[own] = module
        raise


def stage_of(model: nn.Module, cut: Cut, counts: list[int], stage: int) -> nn.Module:
    """The module that runs one stage: copies of the containers around the layers of ``model``."""
    names = _held_by(cut, counts, stage)
    if not cut.decoder:
        copied = _shallow(model)
        _put_elsewhere(copied, cut, set(names))
        return copied
    copied = _shallow(model)
    path = cut.before[0].rpartition(".")[0]
    base = _shallow(model.get_submodule(path))
    base._modules["layers"] = nn.ModuleList(base._modules["layers"])  # type: ignore[arg-type]
    copied._modules[path] = base
    _put_elsewhere(copied, cut, set(names))
    return DecoderStage(copied, path, stage == 0, stage == len(counts) - 1)


def _put_elsewhere(model: nn.Module, cut: Cut, kept: set[str]) -> dict[str, nn.Module | None]:
    """Gives what was there, by name."""
    replaced = {}
    for name in (*cut.before, *(name for name, _ in cut.layers), *cut.after):
        if name not in kept:
            path, _, own = name.rpartition(".")
            around = model.get_submodule(path)._modules
            replaced[name], around[own] = around[own], Elsewhere()
    return replaced


def _shallow(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    copied.__dict__["_modules"] = dict(module._modules)
    return copied


class DecoderStage(nn.Module):
    """A stage of a ``transformers`` decoder: from tokens or hidden states to hidden states or logits."""

    def __init__(self, model: nn.Module, path: str, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self._path, self._first, self._last = path, first, last

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        base, given = self.model._modules[self._path], {"input_ids" if self._first else "inputs_embeds": x}
        assert base is not None
        hidden = base(**given, use_cache=False, **options).last_hidden_state
        return self.model.lm_head(hidden) if self._last else hidden  # type: ignore[operator]
