"""An exponential moving average of a sharded model's parameters, sharded as they are.

Each rank averages the run it owns, in fp32 and straight from the master, on the tier where the optimizer states live. Nothing
is gathered and no rank waits for another, except where whole tensors come out or go in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.optim.own_states import own_states
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of
from unwall.runtime.whole import whole_run
from unwall.shards.dimensions import same_model
from unwall.shards.group import Group
from unwall.shards.local import is_distributed, local_part_of, whole_over_tensor_ranks
from unwall.shards.master import PIECE_ELEMENTS, read_master, write_master
from unwall.shards.states import StateSpec, moment_dtype


class Ema:
    """``average = decay * average + (1 - decay) * parameters`` at each ``update``, beginning with the parameters as they are.

    Parameters that are not trained, and buffers, are left alone."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay is between 0 and 1, got {decay}")
        engine = engine_of(model)
        if engine is None:
            raise RuntimeError(f"{type(model).__name__} is not sharded: call unwall.shard(model) first")
        self.decay = decay
        self.updates = 0
        self._model = model  # keeps the engine, too
        self._own = own_states(self)
        self._begun: set[int] = set()
        engine.edge()
        for group in self._groups():
            self._average(group)
            group.pending.staging.close()

    @property
    def _engine(self) -> Engine:
        engine = engine_of(self._model)
        assert engine is not None
        return engine

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the parameters of now: after ``optimizer.step()``. All ranks call it."""
        self._engine.edge()
        for group in self._groups():
            fresh = group.index not in self._begun
            average = self._average(group)
            if not fresh:
                for piece in _pieces(group.own_numel):
                    value = read_master(group, None, piece.start, piece.stop)
                    average[piece].lerp_(value.to(average.device, average.dtype), 1.0 - self.decay)
            group.pending.staging.close()
        self.updates += 1

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside, the model has the averaged values: to evaluate it, or to save it with ``model.state_dict()``. All ranks enter
        together. Training inside is an error."""
        self._meet()
        self._exchange()
        version = self._engine.version
        try:
            yield
        finally:
            self._engine.edge()
            trained = self._engine.version != version
            self._exchange()
        if trained:
            raise RuntimeError(
                "parameters were changed inside ema.swap(), by a step or a write: the change went into the average. Train "
                "outside of it"
            )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Decay, number of updates, and the whole averages by the parameters' names, fp32 on the host of rank 0 (none on the
        other ranks). All ranks call it together."""
        self._meet()
        params: dict[str, torch.Tensor] = {}
        for group in self._groups():
            whole = whole_run(self._engine, group, self._average(group))
            for slot in group.layout.slots if whole is not None else ():
                assert whole is not None
                found = params.setdefault(slot.name, torch.empty(slot.shape, dtype=whole.dtype))
                slot.range_of(found.view(-1)).copy_(whole[slot.offset : slot.end])
            group.pending.staging.close()
        for name, param in self._named() if params else ():
            if is_distributed(param):
                params[name] = whole_over_tensor_ranks(param, params[name].to(self._engine.device.device)).cpu()
        kept = params if self._engine.is_first else {}
        return {"decay": self.decay, "updates": self.updates, "params": kept}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict`` gave, from rank 0. Nothing is changed where names or shapes do not match."""
        engine = self._engine
        self._meet(counted=False)
        params = state_dict.get("params", {})
        wrong = self._from_first(self._mismatch(params) if engine.is_first else None)
        if wrong:
            raise ValueError(f"this average does not belong to the model: {wrong}")
        for group in self._groups():
            average = self._average(group)
            for at, slot in enumerate(group.layout.slots):
                param = group.params[at]
                value = torch.empty(param.shape, dtype=average.dtype, device=engine.device.device)
                if engine.is_first:
                    value.copy_(params[slot.name])
                for ranks in same_model(engine.ranks, engine.others):
                    ranks.broadcast(value)
                value = local_part_of(param, value)
                for segment in group.owned_segments():
                    if segment.slot == at:
                        part = value.view(-1)[segment.start : segment.start + segment.numel]
                        average[segment.shard_start : segment.shard_start + segment.numel].copy_(part)
            group.pending.staging.close()
        numbers = self._from_first((state_dict.get("decay"), state_dict.get("updates")))
        self.decay, self.updates = float(numbers[0]), int(numbers[1])

    def _from_first(self, thing: Any) -> Any:
        for ranks in same_model(self._engine.ranks, self._engine.others):
            thing = ranks.broadcast_object(thing)
        return thing

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for group in self._groups():
            yield from ((slot.name, param) for slot, param in zip(group.layout.slots, group.params, strict=True))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[Group]:
        for group in self._engine.groups:
            if any(param.requires_grad for param in group.params):
                yield group

    def _average(self, group: Group) -> torch.Tensor:
        """The average of the owned run. It begins as the parameters are."""
        spec = StateSpec("ema", moment_dtype(group.layout.dtype))
        (store,) = self._own.stores(group, [spec]).values()
        average = store.tensor()
        if group.index not in self._begun:
            with torch.no_grad():
                for piece in _pieces(group.own_numel):
                    average[piece].copy_(read_master(group, None, piece.start, piece.stop))
            self._begun.add(group.index)
        return average

    @torch.no_grad()
    def _exchange(self) -> None:
        """Averages and parameters change places."""
        engine = self._engine
        for group in self._groups():
            average = self._average(group)
            for piece in _pieces(group.own_numel):
                value = read_master(group, None, piece.start, piece.stop).clone()
                write_master(group, piece.start, average[piece])
                average[piece].copy_(value)
            group.pending.staging.close()
            group.generation += 1
            engine.executor.invalidate(group.index)
            increment_version(group.params)
        engine.version += 1

    def _meet(self, counted: bool = True) -> None:
        """All ranks are here, and have averaged equally often."""
        engine = self._engine
        engine.edge()
        engine.executor.together("ema")
        counts = engine.ranks.every((self.updates,)) if counted else []
        if len({tuple(count) for count in counts}) > 1:
            raise RuntimeError(f"ema.update() was called {[count[0] for count in counts]} times by the ranks: all must call it")

    def _mismatch(self, params: dict[str, torch.Tensor]) -> str:
        """What is wrong with averages that are to be loaded. Empty: nothing."""
        expected = {name: tuple(param.shape) for name, param in self._named()}
        missing, extra = sorted(expected.keys() - params.keys()), sorted(params.keys() - expected.keys())
        shapes = [
            f"{name} has shape {tuple(params[name].shape)} and needs {shape}"
            for name, shape in expected.items()
            if name in params and tuple(params[name].shape) != shape
        ]
        said = [f"missing {', '.join(missing[:5])}"] if missing else []
        said += [f"not expected {', '.join(extra[:5])}"] if extra else []
        return "; ".join(said + shapes[:5])


def ema(model: nn.Module, decay: float = 0.999) -> Ema:
    """Keeps a moving average of a sharded model's parameters, sharded and on the tier of the optimizer states. See ``Ema``."""
    return Ema(model, decay)


def _pieces(numel: int) -> Iterator[slice]:
    for start in range(0, numel, PIECE_ELEMENTS):
        yield slice(start, min(start + PIECE_ELEMENTS, numel))
