"""An exponential moving average of a sharded model's parameters, sharded as they are.

Each rank averages the run it owns, in fp32 and straight from the master, on the tier where the optimizer states live. Nothing
is gathered and no rank waits for another, except where whole tensors come out or go in.

[Note: half an average]
A disk may fail in the middle. An update remembers the groups that it has averaged, and the next call goes on with the others. A
swap remembers the groups that have changed places: one that fails on the way in takes them back, and what could not be taken
back is tried again whenever the model is used, before anything else.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.native import interrupts
from unwall.native.library import DiskError
from unwall.optim.fit import average_spec, make_room_for_average
from unwall.optim.own_states import own_states
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of
from unwall.runtime.whole import whole_run
from unwall.shards.dimensions import same_model
from unwall.shards.group import Group
from unwall.shards.local import is_distributed, local_part_of, whole_over_tensor_ranks
from unwall.shards.master import PIECE_ELEMENTS, read_master, write_master


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
        self._averaged: set[int] = set()
        """Groups that an update which failed has averaged. See [Note: half an average]."""
        self._averaged_at = 0
        self._swapped: set[int] = set()
        """Groups whose parameters are averages now."""
        self._inside = False
        """Of a swap."""
        engine.edge()
        engine.checks[:] = [check for check in engine.checks if not (isinstance(check, _Restores) and check.is_over)]
        engine.checks.append(_Restores(self))
        make_room_for_average(engine, self._groups())
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
        """Moves the average towards the parameters of now: after ``optimizer.step()``. All ranks call it. After an error call
        it again: it goes on where it was."""
        engine = self._engine
        engine.edge()
        with interrupts.deferred, engine.turn.held("ema.update"):
            self._forget_half()
            for group in self._groups():
                if group.index not in self._averaged:
                    fresh = group.index not in self._begun
                    average = self._average(group)
                    for piece in () if fresh else _pieces(group.own_numel):
                        value = read_master(group, None, piece.start, piece.stop)
                        average[piece].lerp_(value.to(average.device, average.dtype), 1.0 - self.decay)
                    self._averaged.add(group.index)
                group.pending.staging.close()
            self._averaged.clear()
            self.updates += 1

    def _forget_half(self) -> None:
        """An update that failed cannot go on once the parameters are others."""
        missed, version = len(list(self._groups())) - len(self._averaged), self._engine.version
        if self._averaged and self._averaged_at != version:
            warnings.warn(
                f"ema.update() had failed and was not called again before the next step: {missed} groups of parameters have "
                "missed one update of their average",
                RuntimeWarning,
                stacklevel=3,
            )
            self._averaged.clear()
        self._averaged_at = version

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Inside, the model has the averaged values: to evaluate it, or to write them with ``model.state_dict()`` or
        ``unwall.export_weights``. All ranks enter together. Training inside is an error."""
        self._meet()
        if self._inside:
            raise RuntimeError("ema.swap() inside ema.swap(): the model has the averaged values already")
        goes_on = self._averaged_at == self._engine.version  # an update that failed, if there is one
        trained = False
        try:
            self._inside = True
            self._engine.averaged = True
            self._exchange(averaged=True)
            version = self._engine.version
            try:
                yield
            finally:
                self._engine.edge()
                trained = self._engine.version != version
                self._exchange(averaged=False)
        finally:
            self._inside = False
            with suppress(DiskError):
                self.restore()
            self._engine.averaged = bool(self._swapped)
            if goes_on and not trained and not self._swapped:
                self._averaged_at = self._engine.version  # the parameters are those of before
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
            with self._engine.executor.prepared("ema.state_dict"):
                average = self._average(group)
            whole = whole_run(self._engine, group, average)
            for slot in group.layout.slots if whole is not None else ():
                assert whole is not None
                found = params.setdefault(slot.name, torch.empty(slot.shape, dtype=whole.dtype))
                slot.range_of(found.view(-1)).copy_(whole[slot.offset : slot.end])
            with self._engine.executor.prepared("ema.state_dict"):
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
            with engine.executor.prepared("ema.load_state_dict"):
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
            with engine.executor.prepared("ema.load_state_dict"):
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
        (store,) = self._own.stores(group, [average_spec(group)]).values()
        average = store.tensor()
        if group.index not in self._begun:
            with torch.no_grad():
                for piece in _pieces(group.own_numel):
                    average[piece].copy_(read_master(group, None, piece.start, piece.stop))
            self._begun.add(group.index)
        return average

    def _exchange(self, averaged: bool) -> None:
        """Averages and parameters change places, on all ranks or, after the error of one, on none that can help it."""
        engine = self._engine
        with interrupts.deferred, engine.turn.held("ema.swap"), engine.executor.prepared("ema.swap"):
            engine.forward.forget_interrupted()  # or it takes what changes here for writes of its own
            engine.backward.forget_interrupted()
            for group in self._groups():
                if (group.index in self._swapped) is not averaged:
                    self._exchange_one(group)

    def restore(self) -> None:
        """What a swap that failed has left of averages in the parameters goes back. DiskError where that fails: it is tried
        again before the model is used."""
        if self._swapped and not self._inside:
            with interrupts.deferred:
                for group in self._groups():
                    if group.index in self._swapped:
                        self._exchange_one(group)
            self._engine.averaged = False

    @torch.no_grad()
    def _exchange_one(self, group: Group) -> None:
        engine, average = self._engine, self._average(group)
        for piece in _pieces(group.own_numel):
            value = read_master(group, None, piece.start, piece.stop).clone()
            write_master(group, piece.start, average[piece])
            average[piece].copy_(value)
        self._swapped ^= {group.index}
        group.generation += 1
        engine.version += 1
        increment_version(group.params)
        engine.executor.invalidate(group.index)
        group.pending.staging.close()  # where this fails nothing is lost: what was changed is written at the next use

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


class _Restores:
    """An edge: nothing is left in the parameters of a swap that failed. Does not keep the average."""

    def __init__(self, average: Ema) -> None:
        self._average = weakref.ref(average)

    @property
    def is_over(self) -> bool:
        return self._average() is None

    def __call__(self) -> None:
        average = self._average()
        if average is not None:
            average.restore()


def ema(model: nn.Module, decay: float = 0.999) -> Ema:
    """Keeps a moving average of a sharded model's parameters, sharded and on the tier of the optimizer states. See ``Ema``."""
    return Ema(model, decay)


def _pieces(numel: int) -> Iterator[slice]:
    for start in range(0, numel, PIECE_ELEMENTS):
        yield slice(start, min(start + PIECE_ELEMENTS, numel))
