"""A model cut into pipeline stages: which layers each stage runs, and the modules that run them.

[Note: identities]
A stage is the model with identity modules in the place of other stages' layers. So names and numbers of layers stay what they
were, and a state dict of a stage is a part of the model's. Where a rank runs several stages, each is a shallow copy of the
containers: the layers themselves are the same objects.

A decoder does more than run its modules one after the other: some multiply embeddings by a number, or logits, or bound them. So
each stage runs the decoder's own forward. What that makes of hidden states which another stage sent, before the first layer, is
left aside (``Arriving``), and what goes on to the next stage is taken where the last norm would be (``Leaving``).
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


class Arriving(Elsewhere):
    """In the place of the first layer: hidden states go on as another stage has sent them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: torch.Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.sent


class Leaving(Elsewhere):
    """In the place of the last norm: keeps the hidden states for the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.given: torch.Tensor | None = None

    def forward(self, x: Any, *_: Any, **__: Any) -> Any:
        self.given = x
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
        if type(model).forward is not nn.Sequential.forward:
            raise ValueError(
                f"{type(model).__name__} is an nn.Sequential with a forward of its own, which every stage would run: put what "
                "it does into a layer"
            )
        return _checked(model, Cut([(name, layer) for name, layer in model._modules.items() if layer is not None]))
    base = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    layers = getattr(base, "layers", None)
    if isinstance(base, nn.Module) and isinstance(layers, nn.ModuleList) and hasattr(model, "lm_head"):
        path = next(name for name, module in model.named_children() if module is base)
        if isinstance(getattr(base, "embed_tokens", None), nn.Module) and isinstance(getattr(base, "norm", None), nn.Module):
            named = [(f"{path}.layers.{number}", layer) for number, layer in enumerate(layers)]
            return _checked(model, Cut(named, (f"{path}.embed_tokens",), (f"{path}.norm", "lm_head"), decoder=True))
    raise ValueError(
        f"{type(model).__name__} cannot be cut into stages: nn.Sequential can, and decoders of transformers (embed_tokens, "
        "layers, norm, lm_head). For another model build the stages by hand with torch.distributed.pipelining, and shard each "
        "rank's module with unwall.shard"
    )


def _checked(model: nn.Module, cut: Cut) -> Cut:
    """ValueError where the model has parameters that would be in every stage."""
    cut_names = (*cut.before, *(name for name, _ in cut.layers), *cut.after)
    known = {id(param) for name in cut_names for param in model.get_submodule(name).parameters()}
    for name, param in model.named_parameters():
        if id(param) not in known:
            raise ValueError(
                f"{type(model).__name__} cannot be cut into stages: its parameter {name} belongs to none of its layers, so "
                "every stage would train one of its own. Leave the 'pp' dimension out"
            )
    return cut


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
    arriving, leaving = None if stage == 0 else Arriving(), None if stage == len(counts) - 1 else Leaving()
    if arriving is not None:
        base._modules["layers"]._modules["0"] = arriving  # type: ignore[union-attr]
    if leaving is not None:
        base._modules["norm"] = leaving
    return DecoderStage(copied, Seams(base, (model, model.get_submodule(path)), arriving, leaving))


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


@dataclass(frozen=True)
class Seams:
    """Where a stage of a decoder begins and ends. No module, so nothing of it is listed twice."""

    base: nn.Module
    originals: tuple[nn.Module, nn.Module]
    """The whole model and its base, of which the stage has copies."""
    arriving: Arriving | None
    leaving: Leaving | None


class DecoderStage(nn.Module):
    """A stage of a ``transformers`` decoder: from tokens or hidden states to hidden states or logits. [Note: identities]"""

    def __init__(self, model: nn.Module, seams: Seams) -> None:
        super().__init__()
        self.model = model
        self.seams = seams

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        seams = self.seams
        arriving, leaving = seams.arriving, seams.leaving
        for copied, original in zip((self.model, seams.base), seams.originals, strict=True):
            copied.training = original.training  # train() and eval() are called on what pipeline gave
        if arriving is not None:
            arriving.sent = x
        given = {"input_ids" if arriving is None else "inputs_embeds": x}
        try:
            if leaving is None:
                return self.model(**given, use_cache=False, **options).logits
            seams.base(**given, use_cache=False, **options)
            return self._hidden(x, leaving.given)
        finally:
            if arriving is not None:
                arriving.sent = None
            if leaving is not None:
                leaving.given = None

    def _hidden(self, x: torch.Tensor, hidden: Any) -> torch.Tensor:
        if isinstance(hidden, torch.Tensor) and hidden.shape[:2] == x.shape[:2]:
            return hidden
        raise ValueError(
            f"{type(self.model).__name__} cannot be cut into stages: its layers do not hand hidden states, and nothing else, "
            "from one to the next. Leave the 'pp' dimension out"
        )
