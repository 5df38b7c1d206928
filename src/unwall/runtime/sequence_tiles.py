"""``Plan(sequence_tiles=N)``: modules that treat each token by itself run over a part of the sequence at a time.

[Note: token-wise]
What lies between the input and the output of an MLP is several times as large as both, and of a long sequence it may be all
that does not fit. An MLP needs no token to compute another one. So it runs tile by tile, and each tile is computed again in
backward: of its inside only one tile is ever there.

Which modules those are is decided in two steps, because a wrong answer would change values. By what they are: norms, and
modules all of whose children are Linear layers, activation functions, norms and dropout, without parameters of their own. And
by trying them, the first time that they run: random tokens together must give what they give apart. What attends, convolves,
counts statistics or adds positions fails that, and runs as it is.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

TRIED_TOKENS = 6
MOST_TILES = 64
_PARTS = (nn.Linear, nn.Identity, nn.Dropout, nn.LayerNorm, nn.RMSNorm)
_FUNCTIONS = "torch.nn.modules.activation", "transformers.activations"


class Tiles:
    """In how many tiles the token-wise modules of a model run. See [Note: token-wise]."""

    def __init__(self, model: nn.Module, count: int = 1) -> None:
        self.count = count
        """1: as they are."""
        self._model = weakref.ref(model)
        self._modules = -1
        if count > 1:
            self._wrap()

    def more(self) -> bool:
        """Twice as many. False where there is nothing that would run in them."""
        if self._modules < 0:
            self._wrap()
        if not self._modules or self.count >= MOST_TILES:
            return False
        self.count *= 2
        return True

    def _wrap(self) -> None:
        model = self._model()
        found = [] if model is None else list(dict.fromkeys(candidates(model)))
        for module in found:
            module.forward = _tiled(self, module, module.forward)
        self._modules = len(found)


def candidates(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that may be token-wise, by what they are."""
    if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
        return
    if _is_norm(module) or _is_mlp(module):
        yield module
        return
    for child in module.children():
        yield from candidates(child)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("LayerNorm", "RMSNorm")) and next(module.children(), None) is None


def _is_mlp(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or module._parameters or "att" in type(module).__name__.lower():
        return False
    parts = [
        part for child in module.children() for part in (child.children() if isinstance(child, nn.Sequential) else (child,))
    ]
    return sum(isinstance(part, nn.Linear) for part in parts) >= 2 and all(map(_is_part, parts))


def _is_part(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention) or next(module.children(), None) is not None:
        return False
    return isinstance(module, _PARTS) or _is_norm(module) or type(module).__module__ in _FUNCTIONS


def _tiled(tiles: Tiles, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    known: list[bool] = []

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if tiles.count < 2 or torch.compiler.is_compiling() or not _is_one_sequence(args, kwargs, tiles.count):
            return forward(*args, **kwargs)
        if not known:
            known.append(is_token_wise(module, forward, args[0]))
        if not known[0]:
            return forward(*args, **kwargs)
        parts = args[0].chunk(tiles.count, dim=-2)
        return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in parts], dim=-2)

    return run


def _is_one_sequence(args: tuple[Any, ...], kwargs: dict[str, Any], tiles: int) -> bool:
    """Whether a module is given one tensor of enough tokens, and gradients are wanted."""
    if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or not torch.is_grad_enabled():
        return False
    return args[0].dim() >= 2 and args[0].shape[-2] >= max(tiles, TRIED_TOKENS) and args[0].is_floating_point()


def is_token_wise(module: nn.Module, forward: Callable[..., Any], x: torch.Tensor) -> bool:
    """Whether tokens together give what they give apart. Random ones, as those at hand may be alike; without dropout."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad():
            source = torch.Generator(x.device).manual_seed(0)
            shape = (*x.shape[:-2], TRIED_TOKENS, x.shape[-1])
            few = torch.randn(shape, generator=source, device=x.device).to(x.dtype)
            together = forward(few)
            if not isinstance(together, torch.Tensor) or together.shape[:-1] != few.shape[:-1]:
                return False
            half = TRIED_TOKENS // 2
            apart = torch.cat([forward(few[..., :half, :]), forward(few[..., half:, :])], dim=-2)
            # The order in which a product is added up may depend on its size.
            slack = 8 * torch.finfo(together.dtype).eps * max(1.0, float(together.abs().max()))
            return bool(torch.allclose(together, apart, rtol=0, atol=slack))
    finally:
        for part, mode in modes:
            part.training = mode
