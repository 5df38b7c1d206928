"""``unwall.grads``: the gradients of a model by name."""

from collections.abc import Iterator, MutableMapping

import torch
from torch import nn

from unwall.runtime.elements import shape_of
from unwall.runtime.engine import Engine
from unwall.runtime.gradients import Places
from unwall.runtime.hooks import engine_of


class Gradients(MutableMapping[str, torch.Tensor]):
    """The gradients that ``step`` will use, by the names of the parameters. See ``grads``."""

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self._access = engine.shown.access
        names = {name: param for name, param in model.named_parameters(remove_duplicate=False) if id(param) in engine.places}
        self._params = names

    def __iter__(self) -> Iterator[str]:
        """The names of parameters that have a gradient, each parameter once."""
        self._look()
        seen: set[int] = set()
        for name, param in self._params.items():
            if id(param) not in seen and self._has(param):
                seen.add(id(param))
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole gradient, a copy on the device. All ranks together."""
        return self._access.whole(self._present(name))

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Sets the whole gradient, to the same on every rank; the parameter need not have had one."""
        places = self._places(name)
        expected = shape_of(self._engine, places)
        if value.shape != expected:
            raise ValueError(f"the gradient of {name} has shape {tuple(expected)}, got {tuple(value.shape)}")
        with torch.no_grad():
            self._access.put(places, value)
        self._engine.shown.show()

    def __delitem__(self, name: str) -> None:
        """The parameter has no gradient any more, on any rank: all of them call it."""
        for index, slot in self._present(name):
            self._engine.audience.refuse_if_used(index)
            self._engine.discard_gradients(index, {slot})

    def part(self, name: str) -> torch.Tensor:
        """This rank's elements, flat, a copy. They may be none. Needs no other rank."""
        return self._access.part(self._present(name))

    def set_part(self, name: str, value: torch.Tensor) -> None:
        """Sets this rank's elements: as many as ``part`` gives."""
        with torch.no_grad():
            self._access.put_part(self._present(name), value)

    def norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """The norm of each gradient, with one exchange between the ranks for all of them."""
        names = list(self)
        found = self._access.norms(float(norm_type))
        return {name: found[self._engine.places[id(self._params[name])]] for name in names}

    def __repr__(self) -> str:
        return f"<Gradients of {len(self)} parameters>"

    def _look(self) -> None:
        self._access.look()
        self._engine.shown.adopt()

    def _has(self, param: nn.Parameter) -> bool:
        return param.grad is not None

    def _places(self, name: str) -> Places:
        if name not in self._params:
            raise KeyError(f"{name!r} is no parameter of this model")
        self._look()
        return self._engine.places[id(self._params[name])]

    def _present(self, name: str) -> Places:
        places = self._places(name)
        if not self._has(self._params[name]):
            raise KeyError(f"{name!r} has no gradient: run backward first")
        return places


def grads(model: nn.Module) -> Gradients:
    """The gradients between backward and ``step``, by the names of the parameters, on whatever tier they are::

        grads = unwall.grads(model)
        for name, norm in grads.norms().items(): ...          # to log them
        grads["head.weight"] = grads["head.weight"].clamp(-1, 1)
        grads.set_part("head.weight", grads.part("head.weight") * 2)

    Whole gradients are copies on the device: change them and set them. They are without the loss scale, and averaged over the
    ranks (summed with ``Plan(reduce_op="sum")``). All ranks read and set whole gradients together; ``part`` and ``set_part``
    are about this rank's elements alone. A changed gradient is what ``step`` uses. ``param.grad`` shows the same gradients.
    """
    engine = engine_of(model)
    if engine is None:
        raise RuntimeError(f"{type(model).__name__} is not sharded: call unwall.shard(model) first")
    return Gradients(engine, model)
