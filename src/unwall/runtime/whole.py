"""Whole tensors in and out of a sharded model: ``state_dict``, ``load_state_dict``, ``full_params``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unwall.runtime.engine import Engine
from unwall.runtime.places import Place
from unwall.shards.group import Group, Residence
from unwall.shards.master import read_master, rounded, write_master


def whole_run(engine: Engine, group: Group, owned: torch.Tensor, everywhere: bool = False) -> torch.Tensor | None:
    """A state of a group over all ranks: on the host of rank 0 (None elsewhere), or on the device ``everywhere``."""
    if group.own_numel == group.layout.padded_numel:
        whole = owned
    else:
        owned = owned.to(engine.device.device)  # what the ranks exchange lies on the device
        whole = torch.empty(group.layout.padded_numel, dtype=owned.dtype, device=owned.device)
        engine.ranks.all_gather(whole, owned.contiguous()).wait()
    if everywhere:
        return whole.detach().to(engine.device.device)
    return whole.detach().cpu() if engine.ranks.rank == 0 else None


class WholeParams:
    """Gives whole parameters in full precision. Where ranks have to exchange their parts they do so for a group at a time,
    and the last group is kept for its neighbours."""

    def __init__(self, engine: Engine, everywhere: bool = False) -> None:
        self._engine = engine
        self._everywhere = everywhere
        self._held: tuple[int, int] | None = None
        self._whole: torch.Tensor | None = None

    def forget(self) -> None:
        """Lets go of the last group."""
        self._held = self._whole = None

    def get(self, param: nn.Parameter) -> torch.Tensor | None:
        """The parameter as it was given to ``shard``: same shape and dtype. None on ranks that get nothing."""
        places = self._engine.places[id(param)]
        whole: torch.Tensor | None = None
        for place in places:
            group = self._engine.groups[place.group]
            slot, part = group.layout.slots[place.slot], self._part(place)
            if part is None:
                continue
            if slot.whole:
                return part.view(slot.shape).to(part.device, group.dtypes[place.slot], copy=True)
            if whole is None:
                whole = torch.empty(slot.shape, dtype=group.dtypes[place.slot], device=part.device)
            slot.range_of(whole.view(-1)).copy_(part)
        return whole

    def _part(self, place: Place) -> torch.Tensor | None:
        """What lies in a slot, flat and in full precision, where it is needed."""
        group = self._engine.groups[place.group]
        slot = group.layout.slots[place.slot]
        device = self._engine.device.device if self._everywhere else None
        if group.own_numel == group.layout.padded_numel:
            self._engine.executor.together()
            if device is None and self._engine.ranks.rank > 0:
                return None
            return read_master(group, device, slot.offset, slot.end).detach().to(device or "cpu")
        if self._held != (place.group, self._engine.version):
            self._engine.executor.together()
            owned = read_master(group, device)
            self._whole = whole_run(self._engine, group, owned, self._everywhere)
            self._held = (place.group, self._engine.version)
        return None if self._whole is None else self._whole[slot.offset : slot.end]


def put_whole(engine: Engine, param: nn.Parameter, value: torch.Tensor) -> None:
    """Takes a whole value (the same on every rank) into the shards. What was gathered of its groups is out of date then."""
    engine.version += 1
    for place in engine.places[id(param)]:
        _put_part(engine, place, value)


def show_again(engine: Engine, param: nn.Parameter) -> None:
    """A parameter that was lent shows what its group's residence says."""
    for place in engine.places[id(param)]:
        engine.groups[place.group].show(place.slot)


def _put_part(engine: Engine, place: Place, value: torch.Tensor) -> None:
    group, slot = engine.groups[place.group], place.slot
    group.await_readers()
    with torch.no_grad():
        if group.flat_is_home:
            target = group.layout.slots[slot]
            part = rounded(target.range_of(value.reshape(-1)), group.layout.dtype)
            group.view_of(slot).copy_(part.view(target.view_shape))
        for segment in group.owned_segments():
            if segment.slot == slot:
                piece = value.reshape(-1)[segment.start : segment.start + segment.numel]
                write_master(group, segment.shard_start, piece)
    group.generation += 1
    if not group.flat_is_home and group.residence is not Residence.ABSENT:
        # Others of the group may be the user's, or torch's loading, right now: they keep what they show.
        kept = [(other, other.data) for other in group.params if id(other) in engine.lent or id(other) in engine.loading]
        group.drop()
        for other, data in kept:
            other.data = data


@contextmanager
def lend(engine: Engine, params: list[nn.Parameter], write: bool) -> Iterator[None]:
    """Inside, the parameters are whole, in the dtype they were given in, on the device."""
    engine.executor.together()
    reader = WholeParams(engine, everywhere=True)
    # Not those that an outer full_params has lent already, nor parameters that were put into the model after sharding.
    params = [param for param in params if id(param) in engine.places and id(param) not in engine.lent]
    lent: list[nn.Parameter] = []
    try:
        for param in params:
            value = reader.get(param)
            assert value is not None
            engine.lent.add(id(param))
            lent.append(param)
            param.data = value
        yield
        if write:
            for param in lent:
                engine.ranks.broadcast(param.data)
                put_whole(engine, param, param.data)
            engine.groups[0].pending.staging.close()
    finally:
        for param in lent:
            engine.lent.discard(id(param))
            show_again(engine, param)


class StateDictHooks:
    """``state_dict`` and ``load_state_dict`` of one module: whole tensors for its own parameters, one module at a time."""

    def __init__(self, engine: Engine, reader: WholeParams) -> None:
        self._engine = engine
        self._reader = reader

    def saved(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """After ``state_dict`` has put placeholders there: the whole values on rank 0, nothing on the others."""
        for name, param in module._parameters.items():
            if param is None or prefix + name not in state_dict or id(param) not in self._engine.places:
                continue
            value = self._reader.get(param)
            if value is None:
                del state_dict[prefix + name]
            else:
                state_dict[prefix + name] = value
        if prefix == "":
            self._reader.forget()

    def before_load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        """Real memory for the module's own parameters, so that torch's own loading can write and check them."""
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError("load_state_dict(assign=True) would replace sharded parameters: load without assign")
        for name, param in module._parameters.items():
            if param is None or id(param) not in self._engine.places:
                continue
            index, slot = self._engine.places[id(param)][0]
            group = self._engine.groups[index]
            shape, dtype = group.layout.slots[slot].shape, group.dtypes[slot]
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.shape == shape:  # otherwise torch itself reports what is wrong
                param.data = torch.empty(shape, dtype=dtype, device=self._engine.device.device)
                self._engine.loading.add(id(param))

    def after_load(self, module: nn.Module, _: Any) -> None:
        """What was loaded goes into the shards."""
        for param in module._parameters.values():
            if param is None or id(param) not in self._engine.loading:
                continue
            self._engine.loading.discard(id(param))
            put_whole(self._engine, param, param.data)
            show_again(self._engine, param)
