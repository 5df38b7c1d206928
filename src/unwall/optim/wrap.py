"""Any element-wise ``torch.optim`` optimizer over a sharded model."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unwall.optim.alone import alone
from unwall.optim.elementwise import rounded_to, try_out
from unwall.optim.fit import make_room
from unwall.optim.measure import Held
from unwall.optim.runs import Run, runs_of
from unwall.optim.sharded import ShardedOptimizer
from unwall.optim.state_io import check_states, from_rank_0, load_whole_states, put_whole_state, whole_states
from unwall.optim.torch_rule import NO_PAST, InnerStep, Past, TorchRule, bare, past_of, probe, spans, take_step
from unwall.optim.wrapped_inner import share_options, stand_for
from unwall.shards.states import StateSpec, moment_dtype


class Wrapped(ShardedOptimizer):
    """See ``wrap``. The inner optimizer updates flat fp32 pieces of the master ([Note: pieces of a step] in torch_rule.py); its
    states live where the group's states live, on any tier."""

    rule: TorchRule

    def __init__(self, inner: torch.optim.Optimizer, max_grad_norm: float | None, skip_nonfinite: bool = False) -> None:
        self.inner = inner
        groups = [dict(group) for group in inner.param_groups]
        super().__init__(groups, dict(inner.defaults), max_grad_norm, skip_nonfinite)
        self.rule = TorchRule()
        self._begin: dict[nn.Parameter, Past] = {}
        """Before the first step."""
        self._past: dict[nn.Parameter, Past] = {}
        for group in self.param_groups:
            self._learn(group)
        self._take_in(list(self._params()))
        self._shell = bare(inner)
        self._next: tuple[torch.optim.Optimizer, dict[nn.Parameter, Past]] = (self._shell, {})
        """What the step that is being taken makes of the inner optimizer and of pasts."""
        stand_for(self, inner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if not hasattr(self, "rule"):
            return  # torch's constructor: all of them come together
        try:
            self._learn(self.param_groups[-1])
            self._take_in(self.param_groups[-1]["params"])
        except BaseException:
            self.param_groups.pop()
            raise

    def _learn(self, group: dict[str, Any]) -> None:
        """Which states the inner optimizer keeps of the parameters of a param group."""
        params: list[nn.Parameter] = group["params"]
        owner = next((param for param in params if param.dim() > 0), params[0]) if params else None
        if owner is None:
            return
        kept = try_out(self.inner, _options(group), self.inner.state.get(owner, {}), owner)
        for param in params:
            self.rule.kept[id(param)] = kept

    def _take_in(self, params: list[nn.Parameter]) -> None:
        """Room for the states of parameters, and what the inner optimizer has made of them so far."""
        self._make_room()
        pasts: dict[Any, Past] = {}
        for param in params:
            made = self.inner.state.pop(param, {})
            kept = self.rule.kept[id(param)]
            stored = {name for name in kept if name in made and made[name].shape == param.shape}
            self._past[param] = self._begin[param] = _shared(pasts, {k: v for k, v in made.items() if k not in stored}, stored)
            for name in stored:
                if bool((made[name] != rounded_to(made[name], kept[name].initial)).any()):
                    for _, group, slot in self.places(param):
                        spec = next(spec for spec in self.rule.specs(group) if spec.name == name)
                        store = self.own.stores(group, [spec])[spec.key(self.own.owner)]
                        put_whole_state(group, slot, store.tensor(), made[name])
        for engine in self.engines():
            engine.groups[0].pending.staging.close()

    def _make_room(self) -> None:
        for engine in self.engines():
            if engine.plan.lean:
                raise ValueError("Plan(states='lean') is for unwall.AdamW: write Plan(states='exact') for unwall.wrap")
            make_room(engine, self._trained_groups(engine), self.rule, self.own, type(self.inner).__name__)
        self._make_states()

    # -- the step -----------------------------------------------------------------------------------------------------

    def _plan_step(self, held: list[Held]) -> list[list[Run]]:
        options = {id(param): (number, group) for number, group in enumerate(self.param_groups) for param in group["params"]}
        steps: dict[tuple[int, Past, torch.device, torch.dtype], InnerStep] = {}
        keys: list[dict[int, InnerStep]] = []
        classes: dict[InnerStep, list[nn.Parameter]] = {}
        probes = []
        for engine, index, slots in held:
            group, found = engine.groups[index], {}
            device = engine.device.device if group.home.tier == "device" else torch.device("cpu")
            for slot in slots:
                param = group.params[slot]
                number, chosen = options[id(param)]
                key = (number, self._past[param], device, moment_dtype(group.layout.dtype))
                if key not in steps:
                    steps[key] = InnerStep(self._shell, _options(chosen), self._past[param])
                    probes.append(probe(steps[key], device, key[-1], list(self.rule.kept[id(param)].values())))
                found[slot] = steps[key]
                classes.setdefault(steps[key], []).append(param)
            keys.append(found)
        shell = bare(take_step(probes)) if probes else self._shell
        self._next = shell, {}
        for tried in probes:
            after = past_of(tried)
            self._next[1].update(dict.fromkeys(classes[tried.step], after))
            self._keep_new(tried.state, after, classes[tried.step])
        return [
            runs_of(engine.groups[index].owned_segments(), found, gap=1)
            for (engine, index, _), found in zip(held, keys, strict=True)
        ]

    def _keep_new(self, state: Mapping[str, Any], after: Past, params: list[nn.Parameter]) -> None:
        """An option was changed so that the optimizer keeps a state that it did not keep before."""
        new = {name: StateSpec(name, state[name].dtype) for name in after.stored - set(self.rule.kept[id(params[0])])}
        if new:
            for param in params:
                self.rule.kept[id(param)] = {**self.rule.kept[id(param)], **new}
            self._make_room()

    def _count_step(self, held: list[Held]) -> None:
        self._shell, pasts = self._next
        self._past.update(pasts)
        self.inner._opt_called = True  # type: ignore[attr-defined]  # what its schedulers ask
        self.before.count(held)

    def _tensor_names(self, param: nn.Parameter) -> list[str]:
        return list(self.rule.kept[id(param)])

    def _numbers_of(self, param: nn.Parameter) -> dict[str, Any]:
        return {**super()._numbers_of(param), **self._past[param].scalars}

    def _set_number(self, param: nn.Parameter, name: str, value: Any) -> None:
        past = self._past[param]
        if name in past.scalars:
            kept = past.scalars[name]
            new = torch.as_tensor(value).to(kept) if isinstance(kept, torch.Tensor) else value
            self._past[param] = Past({**past.scalars, name: new}, past.stored)
        if name == "step":
            super()._set_number(param, name, value)

    # -- states -------------------------------------------------------------------------------------------------------

    @alone
    def state_dict(self) -> dict[str, Any]:
        """Whole tensors on the host (rank 0; the states are left out on the others), as the inner optimizer names them."""
        for engine in self.engines():
            engine.finish()
        packed = super().state_dict()
        packed["state"] = whole_states(self)
        packed["scaler"] = self.scaler.state_dict()
        for number, param in enumerate(self._params()):
            if number in packed["state"]:
                past, entry = self._past[param], packed["state"][number]
                packed["state"][number] = {
                    **{name: value for name, value in entry.items() if name == "step" or name in past.stored},
                    "inner": {name: _on_host(value) for name, value in past.scalars.items()},
                }
        return packed

    @alone
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes whole tensors (those that rank 0 was given) and keeps this rank's part of them."""
        for engine in self.engines():
            engine.finish()
        states = from_rank_0(self, state_dict)
        params = dict(enumerate(self._params()))
        states = {number: self._as_ours(params.get(number), entry) for number, entry in states.items()}
        check_states(self, states, strict=False)
        pasts: dict[Any, Past] = {}
        loaded = {}
        for number, param in enumerate(self._params()):
            loaded[param] = self._begin[param]
            if number in states:
                names = {name for name in states[number] if name not in ("step", "inner")}
                self._expect(number, param, states[number])
                loaded[param] = _shared(pasts, states[number].get("inner", {}), names)
        check_states(self, states, strict=False)  # also what it has that was not kept until now
        self._load_options(state_dict)
        load_whole_states(self, states)
        self._past = loaded

    def _as_ours(self, param: nn.Parameter | None, entry: dict[str, Any]) -> dict[str, Any]:
        """A state that the inner optimizer saved before it was wrapped has its numbers among its tensors."""
        if param is None or "inner" in entry:
            return entry
        kept = self.rule.kept[id(param)]
        tensors = {name: value for name, value in entry.items() if name in kept or spans(value, param)}
        inner = {name: value for name, value in entry.items() if name not in tensors}
        return {**tensors, "step": entry.get("step", 1), "inner": inner}

    def _load_options(self, state_dict: dict[str, Any]) -> None:
        super()._load_options(state_dict)
        share_options(self, self.inner)

    def _expect(self, number: int, param: nn.Parameter, entry: Mapping[str, Any]) -> None:
        """A state dict must have what the optimizer keeps now. It may have more: options come with it, and may ask for more."""
        kept = self.rule.kept[id(param)]
        missing = sorted(set(kept) - set(entry))
        if missing:
            raise ValueError(
                f"the optimizer state of parameter {number} has no {missing[0]!r}: it comes from another optimizer"
            )
        new = {name: StateSpec(name, entry[name].dtype) for name in entry if name not in ("step", "inner", *kept)}
        if new:
            self.rule.kept[id(param)] = {**kept, **new}
            self._make_room()


def wrap(optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None, skip_nonfinite: bool = False) -> Wrapped:
    """Makes any element-wise ``torch.optim`` optimizer work on a sharded model::

        unwall.shard(model)
        optimizer = unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), max_grad_norm=1.0)

    Its states live where the plan puts optimizer states: device, host or disk. ``skip_nonfinite``: as for ``AdamW``. ValueError
    for an optimizer whose update is not element-wise (it looks at shapes or whole tensors), PlanError where its states take
    more than a budget holds.
    """
    if isinstance(optimizer, ShardedOptimizer):
        raise ValueError(f"{type(optimizer).__name__} works on sharded models already: use it as it is")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"wrap takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return Wrapped(optimizer, max_grad_norm, skip_nonfinite)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's options, as they are now: a tensor (a learning rate may be one) is changed in place by schedulers."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _shared(pasts: dict[Any, Past], scalars: Mapping[str, Any], stored: set[str]) -> Past:
    """Parameters with equal pasts share one, so that they can be updated together."""
    if not scalars and not stored:
        return NO_PAST
    shown = sorted(
        (name, repr(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)) for name, value in scalars.items()
    )
    key = (tuple(shown), frozenset(stored))
    return pasts.setdefault(key, Past(copy.deepcopy(dict(scalars)), frozenset(stored)))


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
