"""AdamW over a sharded model."""

import dataclasses
from typing import Any

import torch

from unwall.native.pool import AdamWStep
from unwall.optim.disk_update import DiskUpdate, Parts, update_on_disk
from unwall.optim.kernels import Span, adamw
from unwall.optim.runs import Run, runs_of
from unwall.optim.sharded import Held, ShardedOptimizer
from unwall.optim.updates import Factor, update_in_memory
from unwall.optim.whole import from_rank_0, load_whole_states, own_states, whole_states
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.layout import SLOT_BYTES
from unwall.shards.master import MASTER, REMAINDER
from unwall.shards.store import Store
from unwall.tiers.ticket import Ticket

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(ShardedOptimizer):
    """Decoupled weight decay Adam, as ``torch.optim.AdamW``, with state only for this rank's shards.

    ``max_grad_norm`` clips the norm of all gradients over all ranks; ``grad_norm`` holds the norm afterwards.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise ValueError(f"lr, eps and weight_decay must not be negative, got {lr}, {eps}, {weight_decay}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, max_grad_norm)
        self._kept = own_states(self, MOMENTS)
        for param in self._params():
            if param.requires_grad:
                self._make_states(self.place(param)[1])

    def _update(self, held: list[Held], factor: torch.Tensor | None, inverse: float) -> None:
        numbers = self._numbers()
        host_factor = Factor(inverse, factor)
        tickets = []
        for engine, index, slots in held:
            group, gradient = engine.groups[index], engine.gradients[index]
            runs = self._runs(group, slots, numbers)
            if group.home.tier == "host":
                group.update = self._on_host(engine, index, runs, host_factor)
                continue
            assert gradient.value is not None
            on_cpu = engine.device.device.type == "cpu"
            scale = host_factor.get() if on_cpu else inverse
            for span, step in self._spans(group, gradient.value, runs):
                now = dataclasses.replace(step, grad_scale=scale)
                tickets.append(adamw(span, now, None if on_cpu or factor is None else factor.float()))
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()

    def _on_host(self, engine: Engine, index: int, runs: list[Run], factor: Factor) -> Ticket:
        group, gradient = engine.groups[index], engine.gradients[index]
        if not group.home.on_disk:
            assert gradient.value is not None
            return update_in_memory(self._spans(group, gradient.value, runs), gradient.landing, factor)
        grad = gradient.stored or gradient.value
        assert grad is not None
        assert group.param is not None
        exp_avg, exp_avg_sq = self._make_states(group)
        parts = Parts(group.param, exp_avg, exp_avg_sq, group.states.get(REMAINDER), group.states.get(MASTER), grad)
        update = DiskUpdate(group.name, parts, runs, group.own_numel, engine.tiers, gradient.landing, factor)
        return update_on_disk(update)

    def _runs(self, group: Group, slots: set[int], numbers: dict[int, AdamWStep]) -> list[Run]:
        """Counts a step for each parameter and gives the runs to update, keyed by their numbers."""
        group.finish_update()
        keys = {}
        for slot in slots:
            param = group.params[slot]
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            keys[slot] = dataclasses.replace(numbers[id(param)], step=state["step"])
        return runs_of(group.owned_segments(), keys, gap=SLOT_BYTES // group.layout.dtype.itemsize)

    def _spans(self, group: Group, value: torch.Tensor, runs: list[Run]) -> list[tuple[Span, AdamWStep]]:
        found = []
        for run in runs:
            assert isinstance(run.key, AdamWStep)
            found.append((self._span(group, value, slice(run.start, run.end)), run.key))
        return found

    def _numbers(self) -> dict[int, AdamWStep]:
        found = {}
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            decay = group["weight_decay"]
            row = AdamWStep(lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=decay, step=0)
            for param in group["params"]:
                found[id(param)] = row
        return found

    def _make_states(self, group: Group) -> tuple[Store, Store]:
        """The moments, which come into being at first use, as the remainder of a split master does."""
        dtype = torch.float64 if group.layout.dtype is torch.float64 else torch.float32
        if dtype is torch.float64 and group.home.on_disk:
            raise ValueError(f"group {group.name} is float64, which is not updated on disk: place it on host or device")
        if group.layout.dtype is torch.bfloat16 and not group.has_state(MASTER):
            group.store(REMAINDER, torch.int16)
        first, second = (self._kept.store(group, name, dtype) for name in MOMENTS)
        return first, second

    def _states_of(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self._make_states(group)
        return first.tensor(), second.tensor()

    def _span(self, group: Group, value: torch.Tensor, part: slice) -> Span:
        exp_avg, exp_avg_sq = self._states_of(group)
        remainder = group.state(REMAINDER, torch.int16)[part] if group.has_state(REMAINDER) else None
        master = group.state(MASTER, torch.float32)[part] if group.has_state(MASTER) else None
        return Span(group.own_param[part], exp_avg[part], exp_avg_sq[part], value[part], remainder, master)

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.AdamW``'s: whole tensors on the host (rank 0; the states are left out on the others)."""
        for engine in self.engines():
            engine.finish()
        packed = super().state_dict()
        packed["state"] = whole_states(self, self._kept)
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
