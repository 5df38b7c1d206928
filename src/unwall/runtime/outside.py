"""Reads and writes of a model's parameters outside every pass: whole values that are lent and taken back.

[Note: lent values]
A parameter that is read outside a pass is a whole tensor of its own for as long as someone looks at it. Whoever writes to that
tensor, to a view of it or to its ``.data`` is found out by version counters (what an address or a numpy array was taken of
is compared by sums), and the value is taken into the master at the next edge: when another parameter is read, or a pass, a
step, ``state_dict`` or ``full_params`` begins. Then the tensor goes, unless the user still holds a part of it. So a loop over
all parameters needs memory for one of them (over ranks: for one group), and one that keeps what it reads gets what it asks for.

What is kept until the parameters have changed (a step) has the values of before. That is said once; a write to it cannot be
taken any more, and raises.

``p.data = tensor`` gives a parameter another value, and leaves the one before to whoever holds it (a backup of an average's).
The tensor itself is lent then where it can be: what is written to it later reaches the parameter, as in torch. Not what is
written past torch to memory of a file or of a numpy array: nothing counts that.

With several ranks the values come by collectives. Who takes part follows from the order of reads alone, never from when some
rank's garbage goes: all ranks must read the same parameters in the same order, and one that does not is a DivergedError.
"""

import warnings
import weakref
from collections import deque
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.runtime.absent import absent_class_of, keep
from unwall.runtime.early_writes import refuse_early_write
from unwall.runtime.engine import Engine
from unwall.runtime.lent import Lent
from unwall.runtime.near import Near
from unwall.runtime.refusals import refuse_tracing
from unwall.runtime.said_writes import say_written
from unwall.runtime.sharing import Sharing
from unwall.runtime.tiled_functions import compute
from unwall.runtime.tiling import Tiling
from unwall.runtime.whole import WholeParams, put_changed, take_shown
from unwall.shards.group import Group
from unwall.shards.local import distributed_like, is_distributed, local, local_part_of
from unwall.shards.master import rounded
from unwall.shards.states import REMAINDER

FEW = 16
"""Values that the user keeps: beyond that not all of them are looked at each time another one is lent."""


_all: "weakref.WeakSet[Outside]" = weakref.WeakSet()


class Outside:
    """Who is asked when a parameter is read or written outside every pass. See [Note: lent values]."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = WholeParams(engine, everywhere=True, given=True)
        self._lent: dict[int, Lent] = {}
        self._old: list[Lent] = []
        self._last: int | None = None
        self._since = 0
        """Values that were lent since all of them were looked at."""
        self._taken = 0
        """How often values were taken: what is lent stays as good as it was."""
        self._looked_at = 0
        """``_age`` then."""
        self._latest: deque[int] = deque(maxlen=FEW)
        """Parameters that were read last."""
        self._sharing = Sharing()
        self._tiling = Tiling(engine)
        engine.edges.append(self.settle)
        _all.add(self)

    def follow(self, group: Group) -> None:
        """From now on this group's parameters ask here."""
        for param in group.params:
            keep(param, self)
        group.faces.written = partial(self._written, group)
        group.faces.is_half = lambda: group.flat_is_home and group.has_state(REMAINDER)

    # -- what absent parameters ask -----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._engine.forward.running

    def bring(self, param: nn.Parameter) -> None:
        """A pass reads a parameter in a way that no hook has announced."""
        if self.is_tiled(param):
            raise self._tiling.refusal(param, "its values")
        for place in self._engine.places[id(param)]:
            self._engine.groups[place.group].faces.check_current(place.slot)
        self._engine.forward.touched(param, self._engine.places[id(param)])
        for place in self._engine.places[id(param)]:
            faces = self._engine.groups[place.group].faces
            faces.open()
            faces.check_current(place.slot)  # it may have come with another value

    def read_data(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """A pass has read ``param.data``: what is written there is found when the pass ends."""
        for place in self._engine.places.get(id(param), ()):
            self._engine.groups[place.group].faces.lent(place.slot, data)

    def about_to_write(self, param: nn.Parameter) -> None:
        for place in self._engine.places.get(id(param), ()):
            self._engine.groups[place.group].faces.may_be_written(place.slot)

    def is_tiled(self, param: nn.Parameter) -> bool:
        return len(self._engine.places[id(param)]) > 1

    def in_tiles(self, func: Any, args: Any, kwargs: Any) -> Any:
        """In a pass: a function of a parameter that lies in tiles."""
        return compute(self._tiling, func, args, kwargs)

    def lend(self, param: nn.Parameter) -> Lent:
        """The whole value, now in the user's hands."""
        self._look_around(id(param))
        known = self._lent.get(id(param))
        if known is None or (self._engine.ranks.size > 1 and self._last != id(param)):
            with torch.inference_mode(mode=False), torch.no_grad():  # what is made in inference mode counts no writes
                value = self._reader.read(param)
            assert value is not None
            if known is None:
                value = distributed_like(param, value)
                known = Lent(param, value, self._age)
        self._lent.pop(id(param), None)
        self._lent[id(param)] = known  # behind those that were lent before
        self._last = id(param)
        return known

    def put(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """``param.data = value``."""
        shape = param.shape
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise RuntimeError(
                f"{self._name(param)} is sharded and keeps its shape {tuple(shape)}: .data cannot become {got}. Change the "
                "model before unwall.shard"
            )
        lent = self.lend(param)
        part, held = local_part_of(param, value), local(lent.tensor)
        if part.dtype == held.dtype and part.data_ptr() == held.data_ptr() and part.stride() == held.stride():
            return  # what was written to it is found out as always
        self._sharing.given(param)
        owner = _owner_of(part, param)
        with torch.inference_mode(mode=False), torch.no_grad():
            if owner is None and self._can_be_adopted(part, held):
                self._lent[id(param)] = lent.succeeded_by(part.detach())
                return
            if not lent.held:
                held.copy_(part)
            else:
                following = lent.succeeded_by(distributed_like(param, torch.empty_like(held)))
                local(following.tensor).copy_(part)
                self._lent[id(param)] = following
        if owner is not None:
            self._sharing.tied(param, owner)
        else:
            self._sharing.copied_from(param, part, self._age)

    def _can_be_adopted(self, part: torch.Tensor, held: torch.Tensor) -> bool:
        """Whether a tensor of the user's may be the lent value itself: the whole of its storage, and nobody else's."""
        if type(part) not in (torch.Tensor, nn.Parameter) or (part.dtype, part.device) != (held.dtype, held.device):
            return False
        whole = part.layout is torch.strided and part.is_contiguous() and not part.is_inference()
        if not whole or part.untyped_storage().nbytes() != part.numel() * part.itemsize:
            return False
        storage = part.untyped_storage()._cdata
        return not any(storage == other.storage for other in chain(self._lent.values(), self._old))

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        group, slot = self._group(param)
        return group.dtypes[slot]

    def in_compute_dtype(self, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        return distributed_like(param, rounded(local(value), self._group(param)[0].layout.dtype))

    # -- taking back --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """An edge: what was written is taken, what nobody holds goes."""
        self._sharing.look(self._age, self._is_ours, self._name)
        if self._lent or self._old or self._last is not None:
            self._last = None
            self._take()
            self._reader.forget()

    @property
    def _age(self) -> int:
        """Another one when parameters have changed, but by what the user wrote to what is lent."""
        return self._engine.version - self._taken

    def _look_around(self, but: int) -> None:
        """Before a value is lent, ``but`` that of this parameter. Where the user keeps many only those that were lent last, or
        a loop would look at each as often as there are parameters: whatever it keeps no longer is mostly among them. What is
        looked at when follows from the order of reads alone, which is that of the other ranks, not from what this one keeps."""
        self._since += 1
        self._latest.append(but)
        if self._since > max(FEW, len(self._engine.places)) or self._looked_at != self._age:
            self._take(but)
        else:
            self._take_of([key for key in dict.fromkeys(self._latest) if key in self._lent], but)

    def _take(self, but: int | None = None) -> None:
        self._since, self._looked_at = 0, self._age
        for key, lent in list(self._lent.items()):
            if lent.version != self._age:
                self._old.append(self._lent.pop(key))
        self._look_after_old()
        self._take_of(list(self._lent), but)

    def _take_of(self, keys: list[int], but: int | None) -> None:
        for key in keys:
            if key != but and self._lent[key].changed:
                self._take_one(self._lent[key])
        for key in keys:
            if key != but and not self._lent[key].held:
                del self._lent[key]

    def _look_after_old(self) -> None:
        """Values of parameters that have changed since."""
        written = [lent for lent in self._old if lent.written]
        self._old = [lent for lent in self._old if lent.held or lent.written]
        for lent in self._old:
            if lent.written:
                lent.taken()
            elif lent.looked_at and not lent.warned:
                self._warn(lent)
        if written:
            raise self._stale(written)

    def _take_one(self, lent: Lent) -> None:
        """A changed value goes to the master; the others that are lent stay as good as they were."""
        before = self._engine.version
        lent.taken()
        try:
            refuse_early_write(self._engine, [lent.param], "the write to a parameter is lost: it came")
        except RuntimeError:
            self._old.append(self._lent.pop(id(lent.param)))
            raise
        say_written(self._engine, self._name(lent.param), local(lent.tensor))
        put_changed(self._engine, lent.param, local(lent.tensor))
        increment_version(lent.param)
        self._taken += self._engine.version - before

    def _written(self, group: Group, slots: list[int]) -> None:
        """A pass has written to parameters that it was shown."""
        for slot in slots:
            take_shown(self._engine, group, slot, group.faces.before.get(slot))

    def _warn(self, lent: Lent) -> None:
        lent.warned = True
        warnings.warn(
            f"a tensor that was read from {self._name(lent.param)} is kept by your code and has the values of before the last "
            "step. Copy what you keep: .detach().clone()",
            RuntimeWarning,
            stacklevel=2,
        )

    def _stale(self, written: list[Lent]) -> RuntimeError:
        names = ", ".join(self._name(lent.param) for lent in written[:5])
        return RuntimeError(
            f"{names} was written through a tensor that was read from it before its value changed (by a step "
            "or by loading): the write is lost. Read the parameter again and write to that, or write inside "
            "unwall.full_params(model, write=True)"
        )

    def _group(self, param: nn.Parameter) -> tuple[Group, int]:
        place = self._engine.places[id(param)][0]
        return self._engine.groups[place.group], place.slot

    def _is_ours(self, param: nn.Parameter) -> bool:
        return id(param) in self._engine.places

    def _name(self, param: nn.Parameter) -> str:
        group, slot = self._group(param)
        return f"parameter {group.layout.slots[slot].name}"


def _owner_of(value: torch.Tensor, but: nn.Parameter) -> nn.Parameter | None:
    """The parameter, of any model, whose lent value lies in the same memory."""
    if value.layout is not torch.strided:
        return None
    storage = value.untyped_storage()._cdata
    every = chain.from_iterable(outside._lent.values() for outside in list(_all))
    return next((lent.param for lent in every if lent.storage == storage and lent.param is not but), None)


def watch_outside(engine: Engine) -> None:
    """From now on parameters that no pass shows are absent ones. Again where groups have come since."""
    if engine.outside is None:
        engine.outside = Outside(engine)
        engine.edges.append(refuse_tracing)
    for group in engine.groups:
        if group.faces.away is None:
            engine.outside.follow(group)
            group.faces.away = absent_class_of(group.params[0])
            group.faces.near = type(group.params[0]) if is_distributed(group.params[0]) else Near
            for slot in range(len(group.params)):
                group.faces.hide(slot)
            group.faces.is_open = False
