"""Gradients between backward and step, looked at and changed by hand, parameter by parameter, on any tier.

[Note: looking]
Whoever looks waits for what is on its way, and has what ``no_sync`` left on the ranks reduced. What a parameter shows is the
gradient that ``step`` will use: without the loss scale, clipped where ``optimizer.clip_grad_norm_`` was called before. Whoever
changes a gradient makes an update that ran ahead of the step a miss (``Gradient.change`` counts as a new gradient), so the step
updates with what the user left there.

Over ranks each has a part of the elements. To change them one by one (times a number, clamped) needs no other rank. To look at
all of them is a collective: all ranks do it, or a DivergedError says who did not.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from unwall.runtime.elements import is_local, part_of, parts_of, put, put_part, whole_of
from unwall.runtime.places import Place
from unwall.shards.dimensions import greatest
from unwall.shards.group import Group

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine

Places = tuple[Place, ...]


class GradientAccess:
    """Reads and writes the gradients of one engine. See [Note: looking]."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self._norms: tuple[object, dict[Places, torch.Tensor]] = (None, {})
        """Those measured last over the ranks, and of what."""

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Before anything is read or changed."""
        engine = self.engine
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("gradients cannot be read or changed while backward runs: do it when backward has ended")
        if engine.replicas is not None or (engine.ranks.size > 1 and not engine.executor.agreement.settled):
            engine.flush()
        else:
            engine.settle()
        engine.audience.looked_at()

    def has(self, places: Places) -> bool:
        """Whether a parameter has a gradient."""
        return all(place.slot in self.engine.gradients[place.group].present for place in places)

    def parts(self, places: Places) -> Iterator[torch.Tensor]:
        """This rank's elements as they are kept, the loss scale still in. Not to be changed, and each only until the next one
        is asked for: what lies on disk is in memory for one group at a time."""
        if self.has(places):
            yield from (part.values for part in parts_of(self.engine, places, self._read))

    def part(self, places: Places) -> torch.Tensor:
        """This rank's elements, flat, in memory of their own."""
        return self._unscaled(part_of(self.engine, places, self._read))

    def whole(self, places: Places) -> torch.Tensor:
        """All elements, on the device, in memory of their own. A collective where ranks have parts."""
        if not is_local(self.engine, places):
            self.engine.together("a whole gradient")
        return self._unscaled(whole_of(self.engine, places, self._read))

    def _read(self, group: Group) -> torch.Tensor:
        gradient = self.engine.gradients[group.index]
        gradient.check()
        if not gradient.held:  # zeros of zero_grad(set_to_none=False): they take no memory before the step
            return torch.zeros(group.own_numel, dtype=group.layout.dtype, device=self.engine.device.device)
        return gradient.read()

    def _unscaled(self, values: torch.Tensor) -> torch.Tensor:
        """fp16 as fp32: what the loss scale has kept above zero stays there."""
        values = values.float() if values.dtype is torch.float16 else values
        return values if self.engine.loss_scale == 1.0 else values.mul_(1.0 / self.engine.loss_scale)

    # -- changing -----------------------------------------------------------------------------------------------------

    def change(self, places: Places) -> Iterator[torch.Tensor]:
        """This rank's elements as they are kept, to be changed in place, each before the next one is asked for."""
        self._begin_change(places)
        yield from (part.values for part in parts_of(self.engine, places, self._written))

    def put(self, places: Places, value: torch.Tensor) -> None:
        """Sets the gradient to a whole value, the same on every rank."""
        self._begin_change(places)
        put(self.engine, places, self._written, self._scaled(value))

    def put_part(self, places: Places, value: torch.Tensor) -> None:
        """Sets this rank's elements."""
        self._begin_change(places)
        put_part(self.engine, places, self._written, self._scaled(value))

    def _begin_change(self, places: Places) -> None:
        for index, _ in places:
            self.engine.audience.refuse_if_used(index)
        self.hold(places)

    def hold(self, places: Places) -> None:
        """The parameter has a gradient from now on, zeros where it had none."""
        for index, slot in places:
            gradient = self.engine.gradients[index]
            if slot not in gradient.present or not gradient.held:
                nbytes = gradient.flat_bytes if gradient.needs_memory else 0
                self.engine.executor.make_room(nbytes, f"gradients of {gradient.group.name}")
                gradient.hold({slot})

    def _written(self, group: Group) -> torch.Tensor:
        return self.engine.gradients[group.index].change()

    def _scaled(self, value: torch.Tensor) -> torch.Tensor:
        value = value.detach().to_dense() if value.is_sparse else value.detach()
        return value if self.engine.loss_scale == 1.0 else value.float() * self.engine.loss_scale

    # -- over all of them ---------------------------------------------------------------------------------------------

    def norm(self, places: Places, order: float) -> torch.Tensor:
        """The norm of one gradient, in its dtype, as torch computes it where this rank has all of it."""
        if not self.has(places):  # zeros of zero_grad(set_to_none=False)
            return torch.zeros((), dtype=self._dtype(places), device=self.engine.device.device)
        if not is_local(self.engine, places) or self.engine.loss_scale != 1.0 or self.engine.others.tensor:
            return self.norms(order)[places]
        value = next(self.parts(places), None) if len(places) == 1 else None
        value = part_of(self.engine, places, self._read) if value is None else value
        wide = torch.float32 if value.dtype is torch.float16 else None
        norm: torch.Tensor = torch.linalg.vector_norm(value, order, dtype=wide)
        return norm

    def norms(self, order: float) -> dict[Places, torch.Tensor]:
        """The norm of each gradient, on the device, in the gradient's dtype. One exchange between the ranks for all of them."""
        engine = self.engine
        state = (
            order,
            engine.loss_scale,
            tuple((gradient.serial, frozenset(gradient.present)) for gradient in engine.gradients),
        )
        if self._norms[0] == state:
            return self._norms[1]
        found = [places for places in dict.fromkeys(engine.places.values()) if self.has(places)]
        cut = any(not is_local(engine, places) for places in found)
        if cut:
            engine.together("the norms of gradients")
        sums = torch.stack([self._powers(places, order) for places in found]) if found else torch.zeros(0)
        total = sums.to(engine.device.device)
        if cut:
            every = torch.zeros(engine.ranks.size, total.numel(), dtype=torch.float64, device=total.device)
            every[engine.ranks.rank] = total
            engine.ranks.merge(every.view(-1))
            total = every.amax(0) if math.isinf(order) else every.sum(0)
        if engine.others.tensor and found:
            total = self._over_tensor_ranks(found, total, order)
        values = total if math.isinf(order) else total.pow(1.0 / order)
        values = values / engine.loss_scale
        norms = {places: value.to(self._dtype(places)) for places, value in zip(found, values, strict=True)}
        self._norms = (state, norms)
        return norms

    def _over_tensor_ranks(self, found: list[Places], total: torch.Tensor, order: float) -> torch.Tensor:
        """Each element of a parameter that tensor ranks share is counted once."""
        if math.isinf(order):
            for dimension in self.engine.others.tensor:
                total = greatest(dimension.ranks, total)
            return total
        copies = [float(self.engine.groups[places[0].group].copies) for places in found]
        return self.engine.others.sum_over_tensor_ranks(total / torch.tensor(copies, dtype=total.dtype, device=total.device))

    def not_finite(self, every: Iterable[Places]) -> bool:
        """Whether a gradient has an element that is not finite, on any rank."""
        own = any(not bool(part.isfinite().all()) for places in every for part in self.parts(places))
        if self.engine.ranks.size > 1:
            self.engine.together("GradScaler's look for inf")
            own = any(self.engine.ranks.every(own))
        for dimension in self.engine.others.beyond:
            own = any(dimension.ranks.every(own))
        return own

    def take_scale_out(self, scale: float) -> None:
        """The loss of these gradients was multiplied with ``scale``: ``step`` takes it out, and what is shown is without it."""
        if self.engine.loss_scale not in (1.0, scale):
            raise RuntimeError(
                f"the loss was scaled by optimizer.scale ({self.engine.loss_scale:g}) and by another scaler ({scale:g}): use "
                "one of both"
            )
        self.engine.loss_scale = scale

    def _powers(self, places: Places, order: float) -> torch.Tensor:
        """The sum of powers, or for the maximum norm the maximum, of this rank's elements."""
        total = torch.zeros((), dtype=torch.float64)
        for values in self.parts(places):
            norm = torch.linalg.vector_norm(values, order, dtype=torch.promote_types(values.dtype, torch.float32))
            norm = norm.double().cpu()
            total = torch.maximum(total, norm) if math.isinf(order) else total + norm.pow(order)
        return total

    def _dtype(self, places: Places) -> torch.dtype:
        dtype = self._read(self.engine.groups[places[0].group]).dtype
        return torch.float32 if dtype is torch.float16 else dtype
