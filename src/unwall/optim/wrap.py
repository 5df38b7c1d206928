"""Any element-wise ``torch.optim`` optimizer over a sharded model.

[Note: element-wise]
An update is element-wise when each element of a parameter changes by its own gradient and state alone. Only then is updating
a shard the same as updating the whole. That is tried, not assumed: one probe tensor is updated whole, another in flat pieces,
and the results must be equal bit by bit.
"""

import copy
from typing import Any

import torch
from torch import nn

from unwall.optim.sharded import Held, ShardedOptimizer
from unwall.optim.whole import OwnStates, from_rank_0, load_whole_states, own_states, whole_states
from unwall.shards.group import Group
from unwall.shards.layout import Segment
from unwall.shards.master import widen_master


class Wrapped(ShardedOptimizer):
    """See ``wrap``. The inner optimizer updates flat fp32 pieces: this rank's part of each parameter."""

    def __init__(self, inner: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        self.inner = inner
        groups = [dict(group) for group in inner.param_groups]
        super().__init__(groups, dict(inner.defaults), max_grad_norm)
        self._pieces: dict[nn.Parameter, nn.Parameter | None] = {}
        inner._unwall_inner = True  # type: ignore[attr-defined]
        for param in self._params():
            piece = self._pieces[param] = self._piece(param)
            if piece is not None and param in inner.state:
                inner.state[piece] = _initial_state(inner.state[param], param, piece)
            inner.state.pop(param, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_pieces"):
            for param in self.param_groups[-1]["params"]:
                self._pieces[param] = self._piece(param)

    def _piece(self, param: nn.Parameter) -> nn.Parameter | None:
        """This rank's part of a parameter's master as a parameter of its own; None where it has none."""
        _, group, slot = self.place(param)
        segment = _segment(group, slot)
        if segment is None:
            return None
        if group.home.on_disk:
            raise ValueError(
                f"wrap keeps its state in memory, but group {group.name} has states on disk: use unwall.AdamW or larger budgets"
            )
        group.fixed = True
        group.generation += 1
        flat = widen_master(group)[segment.shard_start : segment.shard_start + segment.numel]
        return nn.Parameter(flat, requires_grad=False)

    def _update(self, held: list[Held], factor: torch.Tensor | None, inverse: float) -> None:
        updated: set[nn.Parameter] = set()
        for engine, index, slots in held:
            group, value = engine.groups[index], engine.gradients[index].value
            assert value is not None
            engine.gradients[index].await_landing()
            group.finish_update()  # another optimizer's
            for slot in slots:
                param = group.params[slot]
                segment, piece = _segment(group, slot), self._pieces[param]
                updated.add(param)
                self.state[param]["step"] = self.state[param].get("step", 0) + 1
                if segment is None or piece is None:
                    continue
                grad = value[segment.shard_start : segment.shard_start + segment.numel].to(piece.dtype, copy=True)
                grad.mul_(inverse)
                piece.grad = grad if factor is None else grad.mul_(factor.to(grad))
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({key: value for key, value in mine.items() if key != "params"})
            theirs["params"] = [piece for param in mine["params"] if (piece := self._pieces[param]) is not None]
        self.inner.step()
        for param in updated:
            piece = self._pieces[param]
            if piece is None:
                continue
            piece.grad = None
            _, group, slot = self.place(param)
            segment = _segment(group, slot)
            if segment is not None and group.layout.dtype in (torch.bfloat16, torch.float16):
                group.own_param[segment.shard_start : segment.shard_start + segment.numel].copy_(piece)

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors on the host (rank 0; the states are left out on the others), as the inner optimizer names them."""
        packed = super().state_dict()
        kept = self._spread_inner()
        packed["state"] = whole_states(self, kept)
        kept.free()
        packed["scaler"] = self.scaler.state_dict()
        for number, param in enumerate(self._params()):
            if number in packed["state"]:
                piece = self._pieces[param]
                inner = self.inner.state.get(piece, {}) if piece is not None else {}
                scalars = {key: value for key, value in inner.items() if not _spans(value, piece)}
                packed["state"][number]["inner"] = copy.deepcopy(scalars)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes whole tensors (those that rank 0 was given) and keeps this rank's part of them."""
        states = from_rank_0(self, state_dict["state"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        if "scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["scaler"])
        names = sorted({name for entry in states.values() for name in entry if name not in ("step", "inner")})
        kept = own_states(self, tuple(names))
        load_whole_states(
            self, states, kept.names, lambda group: tuple(kept.tensor(group, name, torch.float32) for name in kept.names)
        )
        for number, param in enumerate(self._params()):
            piece = self._pieces[param]
            if piece is None or number not in states:
                continue
            _, group, slot = self.place(param)
            segment = _segment(group, slot)
            assert segment is not None
            entry = copy.deepcopy(states[number].get("inner", {}))
            for name in names:
                if name in states[number]:
                    span = slice(segment.shard_start, segment.shard_start + segment.numel)
                    entry[name] = kept.tensor(group, name, torch.float32)[span].clone()
            self.inner.state[piece] = entry
        kept.free()

    def _spread_inner(self) -> OwnStates:
        """Copies the inner optimizer's tensor states into group states, where ``whole_states`` finds them.

        Every rank must name the same states, also one whose shards hold none of the parameters.
        """
        names: set[str] = set()
        for piece in self._pieces.values():
            if piece is not None:
                names |= {name for name, value in self.inner.state.get(piece, {}).items() if _spans(value, piece)}
        for engine in self.engines():
            engine.executor.together()
            names = engine.ranks.union(names)
        kept = own_states(self, tuple(sorted(names)))
        for param, piece in self._pieces.items():
            _, group, slot = self.place(param)
            segment = _segment(group, slot)
            if piece is None or segment is None:
                continue
            for name in names:
                value = self.inner.state.get(piece, {}).get(name)
                if value is not None:
                    span = slice(segment.shard_start, segment.shard_start + segment.numel)
                    kept.tensor(group, name, torch.float32)[span].copy_(value)
        return kept


def wrap(optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> Wrapped:
    """Makes any element-wise ``torch.optim`` optimizer work on a sharded model::

        unwall.shard(model)
        optimizer = unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), max_grad_norm=1.0)

    ValueError for an optimizer whose update is not element-wise (it looks at shapes or whole tensors).
    """
    if isinstance(optimizer, ShardedOptimizer):
        raise ValueError(f"{type(optimizer).__name__} works on sharded models already: use it as it is")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"wrap takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    _check_element_wise(optimizer)
    return Wrapped(optimizer, max_grad_norm)


def _check_element_wise(optimizer: torch.optim.Optimizer) -> None:
    """See [Note: element-wise]."""
    name = type(optimizer).__name__
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 8, generator=generator)
    grads = [torch.randn(6, 8, generator=generator) for _ in range(3)]
    whole, *pieces = (nn.Parameter(start.clone()), *(nn.Parameter(part.clone()) for part in start.flatten().split([5, 20, 23])))
    try:
        for params in ([whole], pieces):
            trial = copy.copy(optimizer)
            trial.__dict__ = {key: value for key, value in optimizer.__dict__.items() if key != "step"}  # a scheduler's
            options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            trial.param_groups = [{**options, "params": params}]
            trial.state = type(optimizer.state)(dict)
            for model_param, state in list(optimizer.state.items())[:1]:
                trial.state.update({param: _initial_state(state, model_param, param) for param in params})
            for grad in grads:
                parts = [grad] if len(params) == 1 else grad.flatten().split([5, 20, 23])
                for param, part in zip(params, parts, strict=True):
                    param.grad = part.clone()
                trial.step()
    except Exception as error:
        raise ValueError(
            f"{name} cannot be wrapped as an element-wise optimizer: a trial step on flat pieces failed with: {error}"
        ) from error
    if not torch.equal(whole.detach().flatten(), torch.cat([piece.detach() for piece in pieces])):
        raise ValueError(
            f"{name} is not element-wise: updating a parameter in pieces gives another result than updating it whole, so it "
            "cannot run on shards. Use unwall.AdamW or an element-wise optimizer (SGD, Adagrad, RMSprop, Lion, ...)"
        )


def _initial_state(state: dict[str, Any], param: torch.Tensor, piece: torch.Tensor) -> dict[str, Any]:
    """State that an optimizer made when it was built (Adagrad does: the same number for every element), for a piece."""
    made = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape and value.numel() > 0:
            made[name] = value.reshape(-1)[:1].to(piece).expand(piece.numel()).reshape(piece.shape).clone()
        else:
            made[name] = copy.deepcopy(value)
    return made


def _segment(group: Group, slot: int) -> Segment | None:
    return next((segment for segment in group.owned_segments() if segment.slot == slot), None)


def _spans(value: Any, piece: nn.Parameter | None) -> bool:
    """Whether a state has one element for each element of the piece (a moment, not a step count)."""
    return piece is not None and isinstance(value, torch.Tensor) and value.shape == piece.shape and value.dim() > 0
