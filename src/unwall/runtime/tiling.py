"""Parameters that are never whole on the device: their tiles are fetched, used and dropped one after the other.

[Note: tiled operators]
A parameter that lies in tiles ([Note: tiles] in shards/tiles.py) stays absent in a pass, so torch hands every function of it to
runtime/tiled_functions.py, whichever module calls it. Functions that are known there (linear, embedding, products with stacked
experts) run as one autograd node each: forward fetches a tile, computes its part of the result and lets it go; backward fetches
it again for the gradient of the input, and writes the gradient of the tile right into the group's flat gradient, which is
reduced at once if this was the tile's last use in the pass. Autograd never sees a gradient of the whole parameter. Whatever
else reads the parameter is an error that says so.

The node has the parameter among its inputs, so that its output needs a gradient when the parameter is trained, and so that a
backward that was asked for other gradients only (``torch.autograd.grad``) leaves it alone.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime import transforms
from unwall.runtime.places import Place
from unwall.tiers.sizes import format_bytes

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine


class Tile(NamedTuple):
    """Rows of a parameter that is seen as a matrix."""

    place: Place
    start: int
    stop: int


class Tiling:
    """The tiles of one engine's parameters. See [Note: tiled operators]."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._known: dict[int, tuple[tuple[Place, ...], list[Tile]]] = {}

    def has(self, param: nn.Parameter) -> bool:
        """Whether a parameter lies in tiles."""
        return len(self._engine.places.get(id(param), ())) > 1

    def tiles_of(self, param: nn.Parameter) -> list[Tile]:
        """A parameter's tiles, in the order of its rows."""
        places = self._engine.places[id(param)]
        known = self._known.get(id(param))
        if known is None or known[0] is not places:
            known = self._known[id(param)] = places, self._find(param, places)
        return known[1]

    def _find(self, param: nn.Parameter, places: tuple[Place, ...]) -> list[Tile]:
        width, found = param.shape[-1], []
        for place in places:
            slot = self._engine.groups[place.group].layout.slots[place.slot]
            if slot.start % width or slot.numel % width:
                raise RuntimeError(
                    f"{slot.name} lies in {len(places)} slots that are not whole rows, and is never whole on the device: "
                    "no operator can read it"
                )
            found.append(Tile(place, slot.start // width, (slot.start + slot.numel) // width))
        return sorted(found, key=lambda tile: tile.start)

    # -- forward ------------------------------------------------------------------------------------------------------

    def read(self, tile: Tile, width: int, work: Callable[[torch.Tensor], None]) -> None:
        """Fetches a tile, calls ``work`` with its rows and lets it go. ``work`` must not keep them."""
        executor, index = self._engine.executor, tile.place.group
        home = self._engine.home_stream
        with interrupts.deferred, transforms.outside(), home.visited() if home.elsewhere else nullcontext():
            executor.use(index)
        try:
            work(executor.groups[index].view_of(tile.place.slot).detach().view(-1, width))
        finally:
            executor.release(index)

    def expect(self, param: nn.Parameter, tiles: list[Tile]) -> dict[Place, int]:
        """Forward reads these tiles. The result is for ``take``."""
        if not param.requires_grad or not torch.is_grad_enabled():
            return {}
        if param._backward_hooks:
            raise RuntimeError(
                f"{self._name(param)} is read in tiles, and its gradient is never there as a whole: a hook that was registered "
                "on it cannot be called. Remove the hook, or keep the parameter whole: Plan(tiles=1)"
            )
        return {tile.place: self._engine.backward.tiles.expect(tile.place) for tile in tiles}

    # -- backward -----------------------------------------------------------------------------------------------------

    def wants_gradient(self, ctx: Any, param: nn.Parameter) -> bool:
        """Whether the backward that runs now computes the gradient of the parameter, which is the node's second input."""
        node = ctx.next_functions[1][0]
        if node is None:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError as error:
            raise RuntimeError(
                f"torch.autograd.grad cannot give the gradient of {self._name(param)}: it is read in tiles, and its gradient "
                "is never there as a whole. Call backward() and look at .grad, or keep the parameter whole: Plan(tiles=1)"
            ) from error

    def take(self, param: nn.Parameter, tile: Tile, use: int, write: Callable[[torch.Tensor, bool], None]) -> None:
        """A tile's gradient is known. ``write`` adds it to its rows in the flat gradient, and is told if those are empty."""
        engine, width = self._engine, param.shape[-1]
        with interrupts.deferred:
            engine.shown.bringing(None)
            engine.backward.take_tile(param, tile.place, use, lambda target, fresh: write(target.view(-1, width), fresh))

    def failed(self, error: BaseException) -> None:
        """A tiled operator failed in backward: the other ranks are told."""
        self._engine.backward.failed(error)

    # -- what cannot be done ------------------------------------------------------------------------------------------

    def refusal(self, param: nn.Parameter, what: str) -> RuntimeError:
        """For ``what`` needs a parameter whole."""
        places = self._engine.places[id(param)]
        group = self._engine.groups[places[0].group]
        nbytes = param.numel() * group.layout.dtype.itemsize
        return RuntimeError(
            f"{self._name(param)} lies in {len(places)} slots and is never whole on the device, but {what} needs it whole: "
            f"only linear, embedding, matmul and products with stacked experts read it in tiles. Whole it takes "
            f"{format_bytes(nbytes)}, and its gradient as much: with a device_bytes of at least four times that, or "
            f"Plan(tiles=lambda name, param: 1 if name == {self._name(param)!r} else None), it is not cut"
        )

    def _name(self, param: nn.Parameter) -> str:
        place = self._engine.places[id(param)][0]
        return self._engine.groups[place.group].layout.slots[place.slot].name
