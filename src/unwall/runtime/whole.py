"""Whole tensors in and out of a sharded model: ``state_dict``, ``load_state_dict``, ``full_params``.

[Note: full precision]
Whole values are as precise as what training keeps of them: fp32 where there is a master, whatever dtype the parameters were
given in and compute in. Less is asked for (``full_params(dtype=...)``). Where less comes back, only the elements that were
changed replace the master's.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from unwall.native import interrupts
from unwall.runtime.early_writes import refuse_early_write
from unwall.runtime.engine import Engine
from unwall.runtime.near import become_plain
from unwall.runtime.places import Place
from unwall.shards.group import Group, Residence
from unwall.shards.layout import Segment
from unwall.shards.local import is_distributed, local, show, whole_over_tensor_ranks
from unwall.shards.master import read_master, rounded, write_master
from unwall.shards.states import MASTER, REMAINDER


def whole_run(engine: Engine, group: Group, owned: torch.Tensor, everywhere: bool = False) -> torch.Tensor | None:
    """A state of a group over all ranks: on the host of rank 0 (None elsewhere), or on the device ``everywhere``."""
    if group.own_numel == group.layout.padded_numel:
        whole = owned
    else:
        owned = owned.to(engine.device.device)  # what the ranks exchange lies on the device
        whole = torch.empty(group.layout.padded_numel, dtype=owned.dtype, device=owned.device)
        gathered = engine.ranks.all_gather(whole, owned.contiguous())
        (gathered.wait if everywhere else gathered.arrive)()
    if everywhere:
        return whole.detach().to(engine.device.device)
    return whole.detach().cpu() if engine.ranks.rank == 0 else None


def dtypes_of(engine: Engine, param: nn.Parameter) -> tuple[torch.dtype, torch.dtype]:
    """What a parameter was given in, and what it computes in."""
    place = engine.places[id(param)][0]
    group = engine.groups[place.group]
    return group.dtypes[place.slot], group.layout.dtype


def whole_dtype(engine: Engine, param: nn.Parameter) -> torch.dtype:
    """The dtype of a parameter's whole value. See [Note: full precision]."""
    group = engine.groups[engine.places[id(param)][0].group]
    return torch.float32 if group.has_state(MASTER) or group.has_state(REMAINDER) else group.layout.dtype


class WholeParams:
    """Gives whole parameters in full precision. Where ranks have to exchange their parts they do so for a group at a time,
    and the last group is kept for its neighbours. ``given``: in the dtype each was given in."""

    def __init__(self, engine: Engine, everywhere: bool = False, given: bool = False) -> None:
        self._engine = engine
        self._everywhere = everywhere
        self._given = given
        self._what = "a parameter outside a forward" if given else "full_params" if everywhere else "state_dict"
        self._held: tuple[int, int] | None = None
        self._whole: torch.Tensor | None = None
        self._last: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}

    def forget(self) -> None:
        """Lets go of the last group."""
        self._held = self._whole = None
        self._last.clear()

    def get(self, param: nn.Parameter) -> torch.Tensor | None:
        """The whole value, the same tensor each time for a parameter that two modules share. None on ranks that get nothing."""
        self._engine.edge()
        value = self.read(param)  # whatever this rank has already: all ranks take part in the same collectives
        if value is None:
            return None
        version, known = self._last.get(id(param), (-1, None))
        same = None if known is None or version != self._engine.version else known()
        if not self._everywhere:
            value = self._over_tensor_ranks(param, value)
        if same is not None or value is None:
            return same
        self._last[id(param)] = self._engine.version, weakref.ref(value)
        return value

    def _over_tensor_ranks(self, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor | None:
        """All elements, on the host of the first tensor rank."""
        if is_distributed(param):
            value = whole_over_tensor_ranks(param, value.to(self._engine.device.device)).cpu()
        return value if self._engine.others.is_first else None

    def read(self, param: nn.Parameter) -> torch.Tensor | None:
        """What this rank holds of the whole value (under tensor parallelism its part), a new tensor. None on ranks that get
        nothing."""
        given, _ = dtypes_of(self._engine, param)
        dtype = given if self._given else whole_dtype(self._engine, param)
        places = self._engine.places[id(param)]
        whole: torch.Tensor | None = None
        for place in places:
            group = self._engine.groups[place.group]
            slot, part = group.layout.slots[place.slot], self._part(place)
            if part is None:
                continue
            if slot.whole:
                return rounded(part, dtype).view(slot.shape).to(part.device, copy=part.dtype is dtype)
            if whole is None:
                whole = torch.empty(slot.shape, dtype=dtype, device=part.device)
            slot.range_of(whole.view(-1)).copy_(rounded(part, dtype))
        return whole

    def _part(self, place: Place) -> torch.Tensor | None:
        """What lies in a slot, flat and in full precision, where it is needed."""
        group = self._engine.groups[place.group]
        slot = group.layout.slots[place.slot]
        device = self._engine.device.device if self._everywhere else None
        if group.own_numel == group.layout.padded_numel:
            with self._engine.executor.prepared(self._what):
                if device is None and self._engine.ranks.rank > 0:
                    return None
                return read_master(group, device, slot.offset, slot.end).detach().to(device or "cpu")
        if self._held != (place.group, self._engine.version):
            with self._engine.executor.prepared(self._what):
                owned = read_master(group, device)
            self._whole = whole_run(self._engine, group, owned, self._everywhere)
            self._held = (place.group, self._engine.version)
        return None if self._whole is None else self._whole[slot.offset : slot.end]


def put_whole(engine: Engine, param: nn.Parameter, value: torch.Tensor) -> None:
    """Takes a whole value (the same on every rank) into the shards. What was gathered of its groups is out of date then."""
    engine.edge()
    put_changed(engine, param, value, keep=False)


def put_changed(engine: Engine, param: nn.Parameter, value: torch.Tensor, keep: bool = True) -> None:
    """The same for a value that was read and changed. ``keep``: where it is less precise than the master, elements that are
    still what the master rounds to stay as they are."""
    refuse_early_write(engine, [param], "a write to a parameter")
    engine.version += 1
    engine.unwritten.pop(id(param), None)
    for place in engine.places[id(param)]:
        _put_part(engine, place, value, keep)


def take_shown(engine: Engine, group: Group, slot: int, before: torch.Tensor | None = None) -> None:
    """Takes what a parameter, or the flat buffer, shows in the compute dtype: a pass has written there. ``before``: what it was
    before that. See [Note: overwritten halves] in shards/faces.py."""
    param, target, view = group.params[slot], group.layout.slots[slot], group.view_of(slot)
    value = local(param).detach()
    if value.data_ptr() != view.data_ptr():  # .data was set
        if value.shape != target.shape:
            raise RuntimeError(
                f"parameter {target.name} is sharded and keeps its shape {tuple(target.shape)}: a forward has set its .data to "
                f"a tensor of shape {tuple(value.shape)}"
            )
        show(param, view)
    engine.version += 1
    group.generation += 1
    with torch.no_grad():
        if value.data_ptr() != view.data_ptr() and not group.flat_is_home:
            view.copy_(rounded(value, group.layout.dtype))
        shown = None if group.packed is None else _shown(group, slot, value)  # not what the master rounds to
        in_place = group.flat_is_home and group.has_state(REMAINDER) and value.data_ptr() == view.data_ptr()
        before = before if in_place else shown
        _write_segments(group, slot, value, keep=not in_place or before is not None, before=before)
        if group.flat_is_home and value.data_ptr() != view.data_ptr():
            view.copy_(rounded(value, group.layout.dtype))


def _shown(group: Group, slot: int, value: torch.Tensor) -> torch.Tensor:
    """What the parameter showed before a pass has written to it, as far as this rank keeps it."""
    assert group.packed is not None
    run, before = group.packed.shown(group.own_param_for(write=False).to(value.device)), value.clone()
    for segment in group.owned_segments():
        if segment.slot == slot:
            part = run[segment.shard_start : segment.shard_start + segment.numel]
            before.view(-1)[segment.start : segment.start + segment.numel].copy_(part)
    return before


def show_again(engine: Engine, param: nn.Parameter) -> None:
    """A parameter that was lent shows what its group's residence says."""
    for place in engine.places[id(param)]:
        engine.groups[place.group].show(place.slot)


def _write_segments(group: Group, slot: int, value: torch.Tensor, keep: bool, before: torch.Tensor | None = None) -> None:
    """This rank's part of a whole value goes to the master. ``before``: the half of the master, where it is overwritten."""
    flat = value.reshape(-1)
    for segment in group.owned_segments():
        if segment.slot == slot:
            part = slice(segment.start, segment.start + segment.numel)
            old = None if before is None else before.reshape(-1)[part]
            write_master(group, segment.shard_start, _merged(group, segment, flat[part], old) if keep else flat[part])


def _merged(group: Group, segment: Segment, piece: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Values, and the master where it is more precise and they say the same."""
    if not (group.has_state(MASTER) or group.has_state(REMAINDER)) or piece.dtype not in (torch.bfloat16, torch.float16):
        return piece
    master = read_master(group, piece.device, segment.shard_start, segment.shard_start + segment.numel).to(piece.device)
    return torch.where((rounded(master, piece.dtype) if before is None else before) == piece, master, piece.float())


def _put_part(engine: Engine, place: Place, value: torch.Tensor, keep: bool) -> None:
    group, slot = engine.groups[place.group], place.slot
    group.await_readers()
    with torch.no_grad():
        _write_segments(group, slot, value, keep)
        if group.flat_is_home:
            target = group.layout.slots[slot]
            part = rounded(target.range_of(value.reshape(-1)), group.layout.dtype)
            group.view_of(slot).copy_(part.view(target.view_shape))
    group.generation += 1
    if not group.flat_is_home and group.residence is not Residence.ABSENT:
        # Others of the group may be the user's, or torch's loading, right now: they keep what they show.
        kept = [(other, local(other).data) for other in group.params if id(other) in engine.lent or id(other) in engine.loading]
        group.drop()
        for other, data in kept:
            lay_out(other, data)


def lay_out(param: nn.Parameter, tensor: torch.Tensor) -> None:
    """A parameter is plain and shows a tensor that is no part of a flat buffer. ``show_again`` ends that."""
    become_plain(param)
    show(param, tensor)


@contextmanager
def lend(
    engine: Engine, params: Sequence[nn.Parameter], write: bool, rank: int = 0, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Inside, the parameters are whole, in full precision or in ``dtype``, on the device. ``rank``: whose writes count."""
    with engine.turn.held("full_params"):
        yield from _lend(engine, params, write, rank, dtype)


def _lend(engine: Engine, params: Sequence[nn.Parameter], write: bool, rank: int, dtype: torch.dtype | None) -> Iterator[None]:
    with interrupts.deferred:
        engine.edge()
        refuse_early_write(engine, params if write else [], "unwall.full_params(write=True)")
        engine.executor.together("full_params")
    reader = WholeParams(engine, everywhere=True)
    # Not those that an outer full_params has lent already, nor parameters that were put into the model after sharding.
    params = [param for param in params if id(param) in engine.places and id(param) not in engine.lent]
    lent: list[nn.Parameter] = []
    try:
        with interrupts.deferred:
            for param in params:
                value = reader.get(param)
                assert value is not None
                engine.lent.add(id(param))
                lent.append(param)
                lay_out(param, value if dtype is None else rounded(value, dtype))
        with engine.executor.prepared("full_params(write=True)") if write else nullcontext():
            yield
        if write:
            with interrupts.deferred:
                interrupts.commit()
                _take_back(engine, lent, rank, dtype)
    finally:
        with interrupts.deferred:
            for param in lent:
                engine.lent.discard(id(param))
                if engine.is_reshaped(param):  # as transformers does it when it resizes embeddings
                    engine.set_aside(param)
                else:
                    show_again(engine, param)


def _take_back(engine: Engine, lent: list[nn.Parameter], rank: int, dtype: torch.dtype | None) -> None:
    """What one rank has made of the parameters goes into the shards of all."""
    for param in lent:
        if engine.is_reshaped(param):
            continue
        value = local(param).detach().contiguous()
        engine.ranks.broadcast(value, rank)
        put_changed(engine, param, value, keep=dtype is not None)
    engine.groups[0].pending.staging.close()
