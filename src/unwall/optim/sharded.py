"""What every optimizer of a sharded model shares: finding gradients, norm, clipping, loss scale, updates group by group."""

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.native import interrupts
from unwall.native.ticket import NativeTicket
from unwall.optim.alone import alone, alone_after_closure
from unwall.optim.as_before import AsBefore
from unwall.optim.failed_step import refuse_inside_backward, told_to_all
from unwall.optim.group_update import host_work, make_states, settle, spans_on_device
from unwall.optim.measure import Held, measure, norm_at_once
from unwall.optim.norm import check_order, clip_factor, norm_of
from unwall.optim.own_states import own_states
from unwall.optim.param_check import GONE, checked
from unwall.optim.param_states import NumbersOfAll, ParamNumbers, ParamStates, refuse_forgetting
from unwall.optim.rule import UpdateRule
from unwall.optim.runs import Run
from unwall.optim.scaler import UNSCALED, LossScaler
from unwall.optim.seen_states import seen_specs
from unwall.optim.step_hooks import hooks_told
from unwall.optim.step_numbers import numbers_of
from unwall.optim.updates import Factor, HostUpdate, Work
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of, owners
from unwall.schedule.agreement import in_backward
from unwall.shards.group import Group

Found = tuple[Engine, Group, int]


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of ``AdamW`` and ``wrap``. ``param_groups`` hold the model's own parameters, so schedulers and the like just work.

    ``step`` consumes the gradients: a second ``step`` without a new backward changes nothing. A subclass has a ``rule``, which
    does the arithmetic, and says with which numbers (``_plan_step``, ``_count_step``).
    """

    rule: UpdateRule
    state: NumbersOfAll

    uses_at_once = False
    """Whether gradients are used during backward, as ``Plan(grads="transient")`` needs it."""
    grad_norm: torch.Tensor | None
    """Norm of all gradients before clipping, of the last step that measured it."""

    def __init__(
        self, params: Any, defaults: dict[str, Any], max_grad_norm: float | None, skip_nonfinite: bool = False
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive or None, got {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.grad_norm = None
        self.scaler = LossScaler()
        self._clip: torch.Tensor | None = None
        """What ``clip_grad_norm_`` has put off until the step: the factor."""
        self.in_hooks = False
        """The user's, around a step."""
        self._warned = False
        self._known_engines: tuple[object, list[weakref.ref[Engine]]] = (None, [])
        self.before = AsBefore(self)
        """What the last step has found out."""
        super().__init__(params, defaults)
        self.state = NumbersOfAll(ParamNumbers)
        self.own = own_states(self)
        """The rule's states of each group."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError("a sharded model's optimizer cannot be copied: build another one and load optimizer.state_dict()")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(
            "a sharded model's optimizer cannot be pickled: save optimizer.state_dict(), or unwall.save(path, model, optimizer)"
        )

    # -- the torch.optim face -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(checked(param_group))
        for engine in self.engines():
            if engine.plan.transient and not self.uses_at_once:
                raise ValueError(
                    "Plan(grads='transient') keeps no gradients until the step: build unwall.AdamW(..., "
                    "update_in_backward=True), or shard the model with Plan(grads='auto')"
                )
            if not any(looker() == self._clip_now for looker in engine.audience.lookers):
                engine.audience.lookers.append(weakref.WeakMethod(self._clip_now))
                engine.audience.movers.append(weakref.WeakMethod(self._states_move))

    @alone
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of this optimizer's parameters. Without ``set_to_none`` they are zeros, and a step counts them:
        weight decay and momentum act on parameters that get no gradient until then, as in torch."""
        self._forgetting()
        engines = self.engines()
        for engine in engines if not set_to_none else ():
            engine.shown.note_cleared()
        for engine, index, slots in self._held():
            engine.discard_gradients(index, slots)
        for engine in engines:
            mine = self._params() if len(engines) == 1 else [p for p in self._params() if engine_of(p) is engine]
            engine.shown.clear(mine, set_to_none)
        self._clip = None

    @alone_after_closure
    @told_to_all
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if type(self.state) is not NumbersOfAll:
            refuse_forgetting()
        engines = self.engines()
        if in_backward():
            refuse_inside_backward(engines)
        held = self._complete(engines)
        self._compare_numbers(held)  # not before: a fault of which all hear in there leaves nothing said
        for engine, index, _ in held:
            engine.gradients[index].check()  # before anything is updated
        inverse, factor = self._inverse(engines), self._clip
        measures = factor is None and self.max_grad_norm is not None
        if measures or inverse != 1.0 or self.skip_nonfinite:
            counts = inverse != 1.0 or self.skip_nonfinite
            norm = None if counts else norm_at_once(engines, held)
            if norm is None:
                total = measure(engines, held, 2.0, counts)
                if counts and self._overflowed(total, inverse):
                    self._skip()
                    return loss
                norm = norm_of(total, 2.0)
            if measures:
                assert self.max_grad_norm is not None
                factor = clip_factor(self._keep_norm(norm, inverse), self.max_grad_norm)
        elif not self._warned and any(engine.groups[index].layout.dtype is torch.float16 for engine, index, _ in held):
            self._warned = True
            warnings.warn(UNSCALED, stacklevel=4)
        if held:
            self._update(held, factor, inverse)
        else:
            self._nothing_to_update()
        self._clip = None  # not before: a step that failed is tried again as it was
        for engine in engines:
            engine.steps += 1
            engine.ranks.steps += 1
        for engine, index, slots in held:
            engine.version += 1
            engine.executor.invalidate(index)
            engine.discard_gradients(index, slots)
            # As an optimizer that writes in place: backward through a graph that was built before this step raises.
            increment_version([engine.groups[index].params[slot] for slot in slots])
        return loss

    profile_hook_step = staticmethod(hooks_told)  # type: ignore[assignment]
    """Torch wraps ``step`` in it."""

    def _states_move(self, engine: Engine, _: int) -> None:
        self.before.forget(engine)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale: ``optimizer.scale(loss).backward()`` for fp16. ``step`` takes the scale out again."""
        for engine in self.engines():
            engine.loss_scale = self.scaler.scale
        return loss * self.scaler.scale

    @alone
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clips this step's gradients to ``max_norm`` over all ranks and returns their norm. ``norm_type``: its order, any
        positive number or inf. The gradients are multiplied inside ``step``, or before someone looks at them."""
        order = check_order(norm_type)
        engines = self.engines()
        for engine in engines:
            engine.executor.note("clip_grad_norm_")
        self._clip_now()
        norm = self._keep_norm(norm_of(measure(engines, self._complete(engines), order), order), self._inverse(engines))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of order {order} of the gradients is not finite ({float(norm)}): it cannot be clipped to"
            )
        self._clip = clip_factor(norm, float(max_norm))
        return norm

    def states(self, param: nn.Parameter) -> ParamStates:
        """This optimizer's states of one parameter, and its master, by name: to read and to set. See ``ParamStates``."""
        return ParamStates(self, param)

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _forgetting(self) -> None:
        """Gradients are about to be forgotten, with what was computed of them ahead of the step. May refuse it."""

    def _plan_step(self, held: list[Held]) -> list[list[Run]]:
        """For each group what is updated with which numbers. Changes nothing that counts."""
        raise NotImplementedError

    def _count_step(self, held: list[Held]) -> None:
        """Nothing can fail any more: the step is taken."""
        raise NotImplementedError

    def _queue(
        self,
        engine: Engine,
        group: Group,
        runs: list[Run],  # noqa: ARG002 (what was updated ahead is compared with it)
        factor: Factor,  # noqa: ARG002
        work: Work,
    ) -> HostUpdate:
        """Hands a group's update to the thread that updates."""
        return HostUpdate(work, engine.failures, again=group.home.on_disk)

    def _update(self, held: list[Held], factor: torch.Tensor | None, inverse: float) -> Factor:
        """Updates groups. What can fail does so before any of them is updated."""
        on_host = False
        for engine, index, _ in held:
            settle(group := engine.groups[index])
            on_host |= group.home.tier == "host"
        host_factor = Factor(inverse, factor, elsewhere=on_host)
        runs = self._plan_step(held)
        stores = [self.before.stores(engine.groups[index]) for engine, index, _ in held]
        interrupts.commit()
        self._count_step(held)
        tickets: list[NativeTicket] = []
        for (engine, index, _), kept, parts in zip(held, stores, runs, strict=True):
            group = engine.groups[index]
            if group.home.tier == "host":
                work = host_work(self.rule, engine, group, kept, parts, host_factor)
                group.pending.update = self._queue(engine, group, parts, host_factor, work)
                continue
            group.await_readers()
            on_cpu = engine.device.device.type == "cpu"
            scale, clip = (host_factor.get(), None) if on_cpu or factor is None else (inverse, factor.float())
            tickets += self.rule.on_device(spans_on_device(engine, group, kept, parts), scale, clip)
        for ticket in tickets:
            ticket.wait()
        return host_factor

    def _trained_groups(self, engine: Engine) -> list[Group]:
        places = [place for param in self._params() if param.requires_grad for place in self.places(param)]
        return [group for owner, group, _ in places if owner is engine]

    def _make_states(self) -> None:
        """The states of every parameter that is trained, now, so that memory cannot be missing later."""
        for param in self._params():
            if param.requires_grad:
                for _, group, _ in self.places(param):
                    make_states(group, self.rule, self.own)

    def _load_options(self, state_dict: dict[str, Any]) -> None:
        """Takes param groups and loss scale from a state dict. Leaves the states as they are."""
        kept = self.state
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state = kept
        if "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])

    def _tensor_names(self, param: nn.Parameter) -> list[str]:
        """The states that have an element for each of a parameter's."""
        specs = (spec for _, group, _ in self.places(param) for spec in seen_specs(self.rule, group))
        return list(dict.fromkeys(spec.name for spec in specs))

    def _numbers_of(self, param: nn.Parameter) -> dict[str, Any]:
        """What else is kept of a parameter."""
        return {"step": self.state.get(param, {}).get("step", 0)}

    def _set_number(self, param: nn.Parameter, name: str, value: Any) -> None:
        self.state[param][name] = int(value)

    def _nothing_to_update(self) -> None:
        """A step without gradients."""
        if not self.engines() and any(True for _ in self._params()):
            raise RuntimeError(GONE)

    def engines(self) -> list[Engine]:
        """The sharded models whose parameters this optimizer updates."""
        key = [owners.version]
        for group in self.param_groups:
            mine = group["params"]
            key += (len(mine), id(mine[0]), id(mine[-1])) if mine else (0,)
        if self._known_engines[0] != key:
            made = {id(engine): engine for engine in (engine_of(param) for param in self._params()) if engine is not None}
            self._known_engines = key, [weakref.ref(engine) for engine in made.values()]
        found = []
        for known in self._known_engines[1]:  # a step asks often: as few Python calls as that takes
            if (engine := known()) is not None:
                found.append(engine)
        return found

    @staticmethod
    def _engine_of(param: nn.Parameter) -> Engine:
        engine = engine_of(param)
        if engine is None:
            raise RuntimeError(GONE)
        return engine

    def places(self, param: nn.Parameter) -> list[Found]:
        """Where a parameter lies: one slot of one group or, cut into ranges, several."""
        engine = self._engine_of(param)
        return [(engine, engine.groups[place.group], place.slot) for place in engine.places[id(param)]]

    def _params(self) -> Iterator[nn.Parameter]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def _held(self) -> list[Held]:
        """Groups with gradients of this optimizer's parameters, and which slots those are."""
        return self.before.held(self.engines())

    def _complete(self, engines: list[Engine]) -> list[Held]:
        """What there is to update: everything is reduced, and what the user left in ``.grad`` counts."""
        for engine in engines:
            engine.flush()
            engine.shown.settle(self._params())
        return self.before.held(engines)

    def _compare_numbers(self, held: list[Held]) -> None:
        """See [Note: the same numbers] in step_numbers.py. Not of a model without gradients: its ranks may not meet soon."""
        engines = {id(engine): engine for engine, *_ in held if engine.ranks.size > 1}
        if engines:
            numbers = numbers_of(self.param_groups, list(self.defaults), self.max_grad_norm)
            for engine in engines.values():
                engine.executor.agreement.say(*numbers)

    def _clip_now(self, *_: Any) -> None:
        """Someone looks at gradients, or changes them: what was put off until the step is done now."""
        if self._clip is not None:
            factor, self._clip = self._clip, None
            if float(factor) != 1.0:
                self._multiply(factor)

    @torch.no_grad()
    def _multiply(self, factor: torch.Tensor) -> None:
        for engine, index, slots in self._held():
            if not engine.gradients[index].held:
                continue
            run = engine.gradients[index].change()
            for segment in engine.groups[index].owned_segments():
                if segment.slot in slots:
                    run[segment.shard_start : segment.shard_start + segment.numel].mul_(factor.to(run.device))

    def _keep_norm(self, norm: torch.Tensor, inverse: float) -> torch.Tensor:
        self.grad_norm = (norm if inverse == 1.0 else norm * inverse).float()
        return self.grad_norm

    def _skip(self) -> None:
        """Forgets gradients that are not finite."""
        self.zero_grad()
        for engine in self.engines():
            engine.skipped += 1

    @staticmethod
    def _inverse(engines: list[Engine]) -> float:
        """What gradients are multiplied with to take the loss scale out again (whichever optimizer scaled the loss)."""
        return 1.0 / (engines[0].loss_scale if len(engines) == 1 else max((e.loss_scale for e in engines), default=1.0))

    def _overflowed(self, total: torch.Tensor, inverse: float) -> bool:
        overflow = bool(total[1].item() > 0)
        if inverse != 1.0:
            self.scaler.update(overflow)
        return overflow
