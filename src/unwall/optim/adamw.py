"""AdamW over a sharded model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from unwall.native.pool import AdamWStep
from unwall.optim.disk_update import DiskUpdate, Parts
from unwall.optim.early import Ahead, EarlyUpdates, covers
from unwall.optim.kernels import adamw, has_kernel, run_spans
from unwall.optim.runs import Run, runs_of
from unwall.optim.sharded import Held, ShardedOptimizer
from unwall.optim.updates import Factor, in_memory
from unwall.optim.whole import from_rank_0, load_whole_states, own_states, whole_states
from unwall.runtime.engine import Engine
from unwall.runtime.leftovers import Leftovers
from unwall.shards.group import Group
from unwall.shards.layout import SLOT_BYTES
from unwall.shards.master import MASTER, REMAINDER
from unwall.shards.store import Store
from unwall.tiers.ticket import Ticket

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(ShardedOptimizer):
    """Decoupled weight decay Adam, as ``torch.optim.AdamW``, with state only for this rank's shards.

    ``max_grad_norm`` clips the norm of all gradients over all ranks; ``grad_norm`` holds the norm afterwards.
    ``update_in_backward``: states on host and disk are updated in place while backward runs. That is faster where the host has
    no memory to spare, and a promise: each backward is followed by a ``step``, with the learning rate that was set before it,
    and nothing is clipped or scaled. Without it ``step`` stays the moment an update counts, and updates run ahead only where
    spare memory keeps a way back; ``speculate=False`` leaves that memory alone and updates at ``step``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        update_in_backward: bool = False,
        speculate: bool = True,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(f"lr, eps and weight_decay must not be negative, got {lr}, {eps}, {weight_decay}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
        if update_in_backward and max_grad_norm is not None:
            raise ValueError("update_in_backward=True cannot clip: the norm is known only when backward has ended")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, max_grad_norm)
        self._kept = own_states(self, MOMENTS)
        self._early = EarlyUpdates(update_in_backward, speculate)
        leftovers = Leftovers(self, self._early.shadows.free)
        for engine in self.engines():
            leftovers.note(engine)
            engine.free_discarded()
        for param in self._params():
            if param.requires_grad:
                self._make_states(self.place(param)[1])
        for engine in self.engines():
            engine.listen(self._reduced, self._refuse_second_backward if update_in_backward else None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of this optimizer's parameters."""
        if self._early.applied:
            raise RuntimeError(
                "zero_grad() without step(), but update_in_backward=True has used these gradients already: call step() after "
                "each backward, or build the optimizer without update_in_backward"
            )
        self._early.forget()
        super().zero_grad(set_to_none)

    @property
    def ahead(self) -> Ahead:
        """How many groups are updated ahead of the step that is to come, at this moment."""
        return self._early.read()

    # -- during backward ----------------------------------------------------------------------------------------------

    def _reduced(self, engine: Engine, index: int) -> None:
        """A group's gradient is reduced, and on its way to the host: it may be used at once. See optim/early.py."""
        group, gradient = engine.groups[index], engine.gradients[index]
        if group.home.tier != "host" or engine.loss_scale != 1.0 or not gradient.held or self._clip is not None:
            return
        if gradient.pending or gradient.passes > 1:
            return  # it adds up: only ``step`` knows when it is complete
        mine = {id(param) for param in self._params()}
        slots = {slot for slot in gradient.present if id(group.params[slot]) in mine}
        if not slots:
            return
        if self._early.in_place:
            if engine.ranks.size > 1:
                return  # ranks in another order may add to this sum until backward ends
            _settle(group)
            runs = self._runs(group, slots, self._numbers())
            group.pending.update = self._on_host(engine, index, runs, Factor(1.0, None))
            self._early.applied[id(engine), index] = runs
            return
        if group.fixed or not has_kernel(group.layout.dtype) or not self._early.wanted():
            return
        runs = self._runs(group, slots, self._numbers(), count=False)
        if covers(group, runs):
            self._early.speculate(engine, group, self._stores(group), runs)

    def _refuse_second_backward(self, engine: Engine, index: int) -> None:
        if (id(engine), index) in self._early.applied:
            raise RuntimeError(
                f"a second backward or zero_grad() before step(), but update_in_backward=True has updated group "
                f"{engine.groups[index].name} with the gradients it had: call step() after each backward, or build the "
                "optimizer without update_in_backward"
            )

    # -- the step -----------------------------------------------------------------------------------------------------

    def _update(self, held: list[Held], factor: torch.Tensor | None, inverse: float) -> None:
        numbers = self._numbers()
        host_factor = Factor(inverse, factor)
        tickets = []
        for engine, index, slots in held:  # what can fail does so before anything is updated
            if (id(engine), index) in self._early.applied:
                self._check_promise(engine, index, slots, numbers, clipped=factor is not None or inverse != 1.0)
            else:
                _settle(engine.groups[index])
        for engine, index, slots in held:
            group, gradient = engine.groups[index], engine.gradients[index]
            if (id(engine), index) in self._early.applied:
                continue
            runs = self._runs(group, slots, numbers)
            if group.home.tier == "host":
                group.pending.update = self._on_host(engine, index, runs, host_factor)
                continue
            on_cpu = engine.device.device.type == "cpu"
            scale = host_factor.get() if on_cpu else inverse
            for span, step in run_spans(self._tensors(group), gradient.value, runs):
                now = dataclasses.replace(step, grad_scale=scale)
                tickets.append(adamw(span, now, None if on_cpu or factor is None else factor.float()))
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()
        passes = max((engine.gradients[index].passes for engine, index, _ in held), default=0)
        self._early.after_step(None if factor is None and inverse == 1.0 else host_factor, passes)

    def _nothing_to_update(self) -> None:
        self._early.applied.clear()

    def _on_host(self, engine: Engine, index: int, runs: list[Run], factor: Factor) -> Ticket:
        group, gradient, meter = engine.groups[index], engine.gradients[index], engine.tiers.updates
        work: Callable[[], None]
        if group.home.on_disk:
            parts = Parts(self._stores(group), gradient.source)
            work = DiskUpdate(group.name, parts, runs, engine.tiers, gradient.landing, factor).work
        else:
            spans = run_spans(self._tensors(group), gradient.value, runs)
            work = in_memory(spans, gradient.landing, factor, meter, group.name)
        return self._early.commit_or(engine, group, runs, factor, work)

    def _check_promise(self, engine: Engine, index: int, slots: set[int], numbers: dict[int, AdamWStep], clipped: bool) -> None:
        runs = self._runs(engine.groups[index], slots, numbers, count=False, ahead=0)
        if clipped or runs != self._early.applied[id(engine), index]:
            raise RuntimeError(
                f"update_in_backward=True has updated group {engine.groups[index].name} during backward, but since then its "
                "numbers (learning rate, betas, decay) were changed, or this step clips or scales: set them before backward, "
                "or build the optimizer without update_in_backward"
            )

    def _runs(
        self, group: Group, slots: set[int], numbers: dict[int, AdamWStep], count: bool = True, ahead: int = 1
    ) -> list[Run]:
        """The runs to update, keyed by their numbers, those of the step that is ``ahead`` of the last one counted. ``count``:
        that step is taken now."""
        keys = {}
        for slot in slots:
            param = group.params[slot]
            step = self.state[param].get("step", 0) + ahead
            if count:
                self.state[param]["step"] = step
            keys[slot] = dataclasses.replace(numbers[id(param)], step=step)
        return runs_of(group.owned_segments(), keys, gap=SLOT_BYTES // group.layout.dtype.itemsize)

    def _numbers(self) -> dict[int, AdamWStep]:
        found = {}
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            decay = group["weight_decay"]
            row = AdamWStep(lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=decay, step=0)
            for param in group["params"]:
                found[id(param)] = row
        return found

    # -- states -------------------------------------------------------------------------------------------------------

    def _make_states(self, group: Group) -> dict[str, Store]:
        """The moments, which come into being at first use, as the remainder of a split master does."""
        dtype = torch.float64 if group.layout.dtype is torch.float64 else torch.float32
        if dtype is torch.float64 and group.home.on_disk:
            raise ValueError(f"group {group.name} is float64, which is not updated on disk: place it on host or device")
        if group.layout.dtype is torch.bfloat16 and not group.has_state(MASTER):
            group.store(REMAINDER, torch.int16)
        return {name: self._kept.store(group, name, dtype) for name in MOMENTS}

    def _stores(self, group: Group) -> dict[str, Store]:
        """What an update writes, by the names of ``Span``, where it lives."""
        found = self._make_states(group)
        if group.param is not None:
            found["param"] = group.param
        for name in (REMAINDER, MASTER):
            if group.has_state(name):
                found[name] = group.states[name]
        return found

    def _tensors(self, group: Group) -> dict[str, torch.Tensor]:
        """The same as tensors."""
        tensors = {name: store.tensor() for name, store in self._stores(group).items()}
        return {**tensors, "param": group.own_param}

    def _states_of(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (store.tensor() for store in self._make_states(group).values())
        return first, second

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.AdamW``'s: whole tensors on the host (rank 0; the states are left out on the others)."""
        for engine in self.engines():
            engine.finish()
        packed = super().state_dict()
        packed["state"] = whole_states(self, self._kept)
        self._close_staging()
        packed["scaler"] = self.scaler.state_dict()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes whole tensors (those that rank 0 was given) and keeps this rank's part of them."""
        for engine in self.engines():
            engine.finish()
        states = from_rank_0(self, state_dict["state"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        if "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        load_whole_states(self, states, MOMENTS, self._states_of)
        self._close_staging()

    def _close_staging(self) -> None:
        """The memory for looking at a group is enough for its moments, or for its parameters."""
        for engine in self.engines():
            engine.groups[0].pending.staging.close()


def _settle(group: Group) -> None:
    """Before an update: another optimizer's has ended, and what was looked at, or loaded, is on disk again."""
    group.pending.settle()
    group.pending.staging.close()
