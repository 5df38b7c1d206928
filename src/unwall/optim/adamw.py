"""AdamW over a sharded model."""

import dataclasses
from typing import Any

import torch

from unwall.native.pool import AdamWStep
from unwall.optim.kernels import Span, adamw
from unwall.optim.runs import runs_of
from unwall.optim.sharded import ShardedOptimizer
from unwall.optim.whole import load_whole_states, whole_states
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.layout import SLOT_BYTES
from unwall.shards.master import MASTER, REMAINDER

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
        for param in self._params():
            if param.requires_grad:
                self._states_of(self.place(param)[1])

    def _update(self, held: list[tuple[Engine, int, set[int]]], factor: torch.Tensor | None, inverse: float) -> None:
        numbers = self._numbers()
        tickets = []
        for engine, index, slots in held:
            group, value = engine.groups[index], engine.gradients[index].value
            assert value is not None
            on_host = engine.device.device.type == "cpu"
            grad_scale = inverse * (float(factor) if factor is not None and on_host else 1.0)
            keys = {}
            for slot in slots:
                param = group.params[slot]
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                keys[slot] = dataclasses.replace(numbers[id(param)], grad_scale=grad_scale, step=state["step"])
            gap = SLOT_BYTES // group.layout.dtype.itemsize
            for run in runs_of(group.owned_segments(), keys, gap):
                assert isinstance(run.key, AdamWStep)
                span = self._span(group, value, slice(run.start, run.end))
                tickets.append(adamw(span, run.key, None if on_host or factor is None else factor.float()))
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()

    def _numbers(self) -> dict[int, AdamWStep]:
        found = {}
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            decay = group["weight_decay"]
            row = AdamWStep(lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=decay, step=0)
            for param in group["params"]:
                found[id(param)] = row
        return found

    def _states_of(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if group.layout.dtype is torch.float64 else torch.float32
        if group.layout.dtype is torch.bfloat16 and not group.has_state(MASTER):
            group.state(REMAINDER, torch.int16)
        return group.state(MOMENTS[0], dtype), group.state(MOMENTS[1], dtype)

    def _span(self, group: Group, value: torch.Tensor, part: slice) -> Span:
        exp_avg, exp_avg_sq = self._states_of(group)
        remainder = group.state(REMAINDER, torch.int16)[part] if group.has_state(REMAINDER) else None
        master = group.state(MASTER, torch.float32)[part] if group.has_state(MASTER) else None
        return Span(group.own_param[part], exp_avg[part], exp_avg_sq[part], value[part], remainder, master)

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.AdamW``'s: whole tensors on the host (rank 0; the states are left out on the others)."""
        packed = super().state_dict()
        packed["state"] = whole_states(self, MOMENTS)
        packed["scaler"] = self.scaler.state_dict()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes whole tensors (on every rank) and keeps this rank's part of them."""
        states = state_dict["state"]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        if "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        load_whole_states(self, states, MOMENTS, self._states_of)
