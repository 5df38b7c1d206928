"""AdamW over a sharded model."""

import weakref
from typing import Any, Literal

import torch

from unwall.native.pool import AdamWStep
from unwall.optim.adamw_rule import AdamWRule
from unwall.optim.alone import alone
from unwall.optim.early import Ahead, EarlyUpdates, Speculate, covers
from unwall.optim.fit import check_room
from unwall.optim.group_update import host_work, settle, spans_on_device
from unwall.optim.lean_rule import LeanRule, check_lean, wants_lean
from unwall.optim.measure import Held
from unwall.optim.runs import Run
from unwall.optim.sharded import ShardedOptimizer
from unwall.optim.state_io import check_states, from_rank_0, load_whole_states, whole_states
from unwall.optim.updates import Factor, HostUpdate, Work
from unwall.runtime.early_writes import BETWEEN
from unwall.runtime.engine import Engine
from unwall.runtime.leftovers import Leftovers
from unwall.shards.group import Group


class AdamW(ShardedOptimizer):
    """Decoupled weight decay Adam, as ``torch.optim.AdamW``, with state only for this rank's shards.

    ``max_grad_norm`` clips the norm of all gradients over all ranks; ``grad_norm`` holds the norm afterwards.
    ``update_in_backward``: states on host and disk are updated in place while backward runs. That is faster where the host has
    no memory to spare, and a promise: each backward is followed by a ``step``, with the learning rate that was set before it,
    and nothing is clipped or scaled. With ``Plan(grads="transient")`` no gradient is kept, and states on the device are updated
    then, too. Without it ``step`` stays the moment an update counts, and updates run ahead only where spare memory keeps a way
    back: a second place for the states, as far as there is room, or a journal of two bytes per parameter;
    ``speculate="shadows"`` allows only the former, ``speculate=False`` leaves that memory alone and updates at ``step``. The
    result is the same, bit by bit, with all of them.
    ``skip_nonfinite``: a step with a gradient that is inf or NaN on any rank changes nothing, its gradients are forgotten, and
    ``unwall.stats(model).skipped_steps`` counts it. (Steps of a scaled loss are skipped anyway.)
    ``states="lean"``: of bf16 parameters 5 bytes are kept instead of 12: a master of 24 bits, and a byte for each moment
    (docs/lean.md). None: as ``Plan(states=...)`` says, which also says what fits; that is ``"exact"`` unless it was set.
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
        speculate: Speculate = True,
        skip_nonfinite: bool = False,
        states: Literal["exact", "lean"] | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(f"lr, eps and weight_decay must not be negative, got {lr}, {eps}, {weight_decay}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
        if update_in_backward and max_grad_norm is not None:
            raise ValueError("update_in_backward=True cannot clip: the norm is known only when backward has ended")
        if update_in_backward and skip_nonfinite:
            raise ValueError("update_in_backward=True cannot skip a step: it has updated before all gradients are known")
        if speculate not in (True, False, "shadows", "journal"):
            raise ValueError(f'speculate is True, False, "shadows" or "journal", got {speculate!r}')
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.uses_at_once = update_in_backward
        super().__init__(params, options, max_grad_norm, skip_nonfinite)
        lean = wants_lean(states, any(engine.plan.lean for engine in self.engines()), speculate)
        self.rule = LeanRule() if lean else AdamWRule()
        if lean:
            check_lean(group for param in self._params() for _, group, _ in self.places(param))
        self._early = EarlyUpdates(self.rule, update_in_backward, "shadows" if lean and speculate else speculate)
        frees = [self._early.shadows.free]
        if self._early.journaling is not None:
            frees.append(self._early.journaling.journals.free)
        for leftovers in [Leftovers(self, free) for free in frees]:
            for engine in self.engines():
                leftovers.note(engine)
        for engine in self.engines():
            engine.free_discarded()
        for engine in self.engines():
            groups = self._trained_groups(engine)
            if not all(group.judged for group in groups):  # parameters that came, or thawed, since ``shard``
                check_room(engine, groups, self.rule, self.own, type(self).__name__)
        self._make_states()
        for engine in self.engines():
            engine.audience.listen(self._reduced, self._refuse_second_backward if update_in_backward else None)
            engine.audience.movers.append(weakref.WeakMethod(self._moving))

    def _forgetting(self) -> None:
        if self._early.applied:
            raise RuntimeError(
                "zero_grad() without step(), but update_in_backward=True has used these gradients already: call step() after "
                "each backward, or build the optimizer without update_in_backward"
            )
        self._early.forget()

    @property
    def ahead(self) -> Ahead:
        """How many groups are updated ahead of the step that is to come, at this moment."""
        return self._early.read()

    def _moving(self, engine: Engine, _: int) -> None:
        self._early.leave(engine)

    # -- during backward ----------------------------------------------------------------------------------------------

    def _reduced(self, engine: Engine, index: int) -> None:
        """A group's gradient is reduced, and on its way to the host: it may be used at once. See optim/early.py."""
        group, gradient = engine.groups[index], engine.gradients[index]
        on_device = group.home.tier == "device"
        if on_device and not gradient.transient:
            return
        if engine.loss_scale != 1.0 or not gradient.held or self._clip is not None:
            return
        if gradient.passes > 1 or not gradient.pending.isdisjoint(gradient.present):
            return  # it adds up: only ``step`` knows when it is complete
        mine = {id(param) for param in self._params()}
        slots = {slot for slot in gradient.present if id(group.params[slot]) in mine}
        if not slots:
            return
        if self._early.in_place and engine.ranks.size == 1:
            self._use(engine, index, slots)
            return
        if gradient.pending:
            return
        if not self.rule.runs_ahead(group.layout.dtype) or not self._early.wanted():
            return
        runs = self._runs(group, slots, self._numbers())
        if covers(group, runs):
            self._early.speculate(engine, group, self.before.stores(group), runs)

    def _use(self, engine: Engine, index: int, slots: set[int]) -> None:
        """Updates in place the parameters of a group whose gradients are there and were not used yet."""
        group, gradient, key = engine.groups[index], engine.gradients[index], (id(engine), index)
        before, fresh = slots & gradient.used, slots - gradient.used
        if not fresh:
            return  # told twice
        if not all(group.layout.slots[slot].whole for slot in fresh):
            return  # the other parts of a parameter are of the same step
        settle(group)
        numbers = self._numbers()
        if before:
            self._check_promise(engine, index, before, numbers, clipped=False)
        runs = self._runs(group, fresh, numbers)
        if group.home.tier == "device":
            self._update_on_device(engine, group, runs)
        else:
            factor = Factor(1.0, None)
            work = host_work(self.rule, engine, group, self.before.stores(group), runs, factor)
            group.pending.update = self._queue(engine, group, runs, factor, work)
        self.before.count([(engine, index, fresh)])
        self._early.applied[key] = self._runs(group, slots, numbers, ahead=0)
        gradient.use(fresh)
        engine.audience.updated_early(index, fresh)

    @torch.no_grad()
    def _update_on_device(self, engine: Engine, group: Group, runs: list[Run]) -> None:
        """In backward, when the gradients of all uses of the group's parameters are known."""
        group.await_readers()
        for ticket in self.rule.on_device(spans_on_device(engine, group, self.before.stores(group), runs), 1.0, None):
            ticket.wait()

    def _refuse_second_backward(self, engine: Engine, index: int) -> None:
        if (id(engine), index) in self._early.applied:
            raise RuntimeError(
                f"a second backward, zero_grad() or a changed gradient before step(), but update_in_backward=True has updated "
                f"group {engine.groups[index].name} with the gradients it had: call step() after each backward, or build the "
                "optimizer without update_in_backward"
            )

    # -- the step -----------------------------------------------------------------------------------------------------

    def _update(self, held: list[Held], factor: torch.Tensor | None, inverse: float) -> Factor:
        clipped = factor is not None or inverse != 1.0
        numbers: list[AdamWStep] | None = None
        left = []
        for engine, index, slots in held:
            used = slots & engine.gradients[index].used
            if used:
                numbers = self._numbers() if numbers is None else numbers
                self._check_promise(engine, index, used, numbers, clipped)
            if used != slots:
                left.append((engine, index, slots - used))
        with self._early.claiming((engine, index) for engine, index, _ in left):
            host_factor = super()._update(left, factor, inverse)
        gradients = [engine.gradients[index] for engine, index, _ in held]
        passes = max((gradient.passes for gradient in gradients), default=0)
        self._early.after_step(host_factor if clipped else None, passes, any(gradient.changed for gradient in gradients))
        return host_factor

    def _plan_step(self, held: list[Held]) -> list[list[Run]]:
        numbers = self._numbers()
        return [self._runs(engine.groups[index], slots, numbers) for engine, index, slots in held]

    def _count_step(self, held: list[Held]) -> None:
        self.before.count(held)

    def _queue(self, engine: Engine, group: Group, runs: list[Run], factor: Factor, work: Work) -> HostUpdate:
        return self._early.commit_or(engine, group, runs, factor, work)

    def _nothing_to_update(self) -> None:
        super()._nothing_to_update()
        self._early.applied.clear()

    def _check_promise(self, engine: Engine, index: int, slots: set[int], numbers: list[AdamWStep], clipped: bool) -> None:
        runs, applied = self._runs(engine.groups[index], slots, numbers, ahead=0), self._early.applied.get((id(engine), index))
        if applied is None:
            raise RuntimeError(
                f"update_in_backward=True of an optimizer before this one has used the gradient of group "
                f"{engine.groups[index].name}: a step with it would count twice. Drop that optimizer, and build another "
                "one before the forward. From here its step goes on or, where it is gone, model.zero_grad()"
            )
        if clipped or runs != applied:
            raise RuntimeError(
                f"update_in_backward=True has updated group {engine.groups[index].name} during backward, but since then its "
                "numbers (learning rate, betas, decay) were changed, or this step clips or scales: set them before backward, "
                "or build the optimizer without update_in_backward"
            )

    def _runs(self, group: Group, slots: set[int], numbers: list[AdamWStep], ahead: int = 1) -> list[Run]:
        """The runs to update, keyed by the numbers of the step that comes ``ahead`` steps after the last one counted."""
        return self.before.runs(group, slots, numbers, ahead)

    def _numbers(self) -> list[AdamWStep]:
        """Of each param group. For ``_runs``, which takes the parameters as they are now."""
        self.before.look(self.engines())
        found = []
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), group["weight_decay"]
            found.append(AdamWStep(lr=lr, beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=decay, step=0))
        return found

    # -- states -------------------------------------------------------------------------------------------------------

    def refuse_between(self) -> None:
        """RuntimeError where states are those of the next step in part: whoever saved or loaded them would lose updates."""
        if self._early.applied:
            raise RuntimeError(f"{BETWEEN} some groups already: call it after step()")

    @alone
    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.AdamW``'s: whole tensors on the host (rank 0; the states are left out on the others)."""
        self.refuse_between()
        for engine in self.engines():
            engine.finish()
        packed = super().state_dict()
        packed["state"] = whole_states(self)
        packed["scaler"] = self.scaler.state_dict()
        return packed

    @alone
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes whole tensors (those that rank 0 was given) and keeps this rank's part of them."""
        self.refuse_between()
        for engine in self.engines():
            engine.finish()
        states = from_rank_0(self, state_dict)
        check_states(self, states)
        self._load_options(state_dict)
        load_whole_states(self, states)
