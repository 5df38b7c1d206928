"""What every optimizer of a sharded model shares: finding gradients, norm, clipping, loss scale, updates group by group."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.native.ticket import NativeTicket
from unwall.optim.group_update import host_work, make_states, settle, spans_in_memory, stores_of
from unwall.optim.norm import clip_factor, total_squares
from unwall.optim.own_states import own_states
from unwall.optim.rule import UpdateRule
from unwall.optim.runs import Run
from unwall.optim.scaler import LossScaler
from unwall.optim.updates import Factor, HostUpdate
from unwall.runtime.engine import Engine
from unwall.runtime.hooks import engine_of
from unwall.shards.group import Group
from unwall.shards.squares import counted_part

Found = tuple[Engine, Group, int]
Held = tuple[Engine, int, set[int]]
"""A group with gradients, and which of its parameters have one."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of ``AdamW`` and ``wrap``. ``param_groups`` hold the model's own parameters, so schedulers and the like just work.

    ``step`` consumes the gradients: a second ``step`` without a new backward changes nothing. A subclass has a ``rule``, which
    does the arithmetic, and says with which numbers (``_plan_step``, ``_count_step``).
    """

    rule: UpdateRule

    grad_norm: torch.Tensor | None
    """Norm of all gradients before clipping, of the last step that measured it."""

    def __init__(self, params: Any, defaults: dict[str, Any], max_grad_norm: float | None) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive or None, got {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self.grad_norm = None
        self.scaler = LossScaler()
        self._clip: float | None = None
        super().__init__(params, defaults)
        self.own = own_states(self)
        """The rule's states of each group."""

    # -- the torch.optim face -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group.get("params")
        if isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
            param_group = {**param_group, "params": list(params)}
        listed = param_group["params"]
        for param in [listed] if isinstance(listed, torch.Tensor) else listed:
            tensor: Any = param[1] if isinstance(param, tuple) else param
            if engine_of(tensor) is None:
                raise ValueError(
                    f"a parameter of shape {tuple(tensor.shape)} does not belong to a sharded model: call unwall.shard(model) "
                    "first, then build the optimizer from model.parameters()"
                )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 (torch's signature)
        """Forgets the gradients of this optimizer's parameters."""
        for engine, index, slots in self._held():
            engine.discard_gradients(index, slots)
        self._clip = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for engine in self.engines():
            engine.flush()
        held = list(self._held())
        for engine, index, _ in held:
            engine.gradients[index].check()  # before anything is updated
        inverse = self._inverse()
        clip = self._clip if self._clip is not None else self.max_grad_norm
        factor: torch.Tensor | None = None
        if clip is not None or inverse != 1.0:
            total = self._measure(held)
            if inverse != 1.0 and self._overflowed(total):
                self.zero_grad()
                return loss
            if clip is not None:
                factor = clip_factor(self._norm_of(total), clip)
        if held:
            self._update(held, factor, inverse)
        else:
            self._nothing_to_update()
        self._clip = None  # not before: a step that failed is tried again as it was
        for engine in self.engines():
            engine.steps += 1
        for engine, index, slots in held:
            engine.version += 1
            engine.executor.invalidate(index)
            engine.discard_gradients(index, slots)
            # As an optimizer that writes in place: backward through a graph that was built before this step raises.
            increment_version([engine.groups[index].params[slot] for slot in slots])
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale: ``optimizer.scale(loss).backward()`` for fp16. ``step`` takes the scale out again."""
        for engine in self.engines():
            engine.loss_scale = self.scaler.scale
        return loss * self.scaler.scale

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clips this step's gradients to ``max_norm`` over all ranks (done inside ``step``) and returns their norm."""
        for engine in self.engines():
            engine.flush()
        self._clip = float(max_norm)
        return self._norm_of(self._measure(list(self._held())))

    # -- for subclasses -----------------------------------------------------------------------------------------------

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
        work: Callable[[], None],
    ) -> HostUpdate:
        """Hands a group's update to the thread that updates."""
        return HostUpdate(work, engine.failures, again=group.home.on_disk)

    def _update(self, held: list[Held], factor: torch.Tensor | None, inverse: float) -> Factor:
        """Updates groups. What can fail does so before any of them is updated."""
        host_factor = Factor(inverse, factor)
        for engine, index, _ in held:
            settle(engine.groups[index])
        runs = self._plan_step(held)
        stores = [stores_of(engine.groups[index], self.rule, self.own) for engine, index, _ in held]
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
            tickets += self.rule.on_device(spans_in_memory(engine, group, kept, parts), scale, clip)
        for ticket in tickets:
            ticket.wait()
        return host_factor

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

    def _count_params(self, held: list[Held]) -> None:
        """One more step of every parameter that is updated, in however many slots it lies."""
        for param in {engine.groups[index].params[slot] for engine, index, slots in held for slot in slots}:
            self.state[param]["step"] = self.state[param].get("step", 0) + 1

    def _nothing_to_update(self) -> None:
        """A step without gradients."""

    def engines(self) -> list[Engine]:
        """The sharded models whose parameters this optimizer updates."""
        found = {id(engine): engine for engine in (engine_of(param) for param in self._params()) if engine is not None}
        return list(found.values())

    def places(self, param: nn.Parameter) -> list[Found]:
        """Where a parameter lies: one slot of one group or, cut into ranges, several."""
        engine = engine_of(param)
        assert engine is not None
        return [(engine, engine.groups[place.group], place.slot) for place in engine.places[id(param)]]

    def _params(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _held(self) -> Iterator[tuple[Engine, int, set[int]]]:
        """Groups with gradients of this optimizer's parameters, and which slots those are."""
        mine: dict[tuple[int, int], tuple[Engine, set[int]]] = {}
        for param in self._params():
            for engine, group, slot in self.places(param):
                gradient = engine.gradients[group.index]
                if slot in gradient.present or slot in gradient.pending:
                    mine.setdefault((id(engine), group.index), (engine, set()))[1].add(slot)
        for (_, index), (engine, slots) in sorted(mine.items(), key=lambda item: item[0][1]):
            yield engine, index, slots

    def _measure(self, held: list[Held]) -> torch.Tensor:
        """``[sum of squares, not finite]`` of all gradients over all ranks, the loss scale still in."""
        total = None
        for engine in self.engines():
            part = total_squares(_pieces(engine, held), engine.device.device)
            part = engine.executor.agreement.sum(part)
            total = part if total is None else total + part.to(total.device)
        assert total is not None
        return total

    def _norm_of(self, total: torch.Tensor) -> torch.Tensor:
        self.grad_norm = (total[0].sqrt() * self._inverse()).float()
        return self.grad_norm

    def _inverse(self) -> float:
        """What gradients are multiplied with to take the loss scale out again (whichever optimizer scaled the loss)."""
        return 1.0 / max((engine.loss_scale for engine in self.engines()), default=1.0)

    def _overflowed(self, total: torch.Tensor) -> bool:
        overflow = bool(total[1].item() > 0)
        self.scaler.update(overflow)
        return overflow


def _pieces(engine: Engine, held: list[Held]) -> Iterator[torch.Tensor]:
    """This rank's part of each gradient: every element of the model is counted on exactly one rank."""
    for owner, index, slots in held:
        gradient = engine.gradients[index]
        if owner is not engine:
            continue
        gradient.check()
        if not gradient.held:
            continue
        mine = slots == gradient.present  # and not also parameters of another optimizer
        if mine and gradient.square_sum is not None:
            yield gradient.square_sum  # measured on its way to the host
            continue
        group = engine.groups[index]
        part = counted_part(gradient.read(), group, engine.ranks.rank)
        if mine:
            yield part
            continue
        for segment in group.layout.segments(engine.ranks.rank):
            if segment.slot in slots:
                yield part[segment.shard_start : segment.shard_start + segment.numel]
