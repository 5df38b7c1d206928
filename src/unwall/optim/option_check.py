"""What ``load_state_dict`` of an optimizer is given, looked at before anything changes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

NOT_NEGATIVE = ("lr", "weight_decay", "eps")


def check_options(mine: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any], state_dict: Any) -> None:
    """ValueError where a state dict has no param groups, other ones than ``mine``, or options with which no step can be taken.

    ``defaults``: the options of the optimizer, of which each group must have its own."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"this is no state dict of an optimizer: expected a dict with 'state' and 'param_groups', got {got}")
    groups = state_dict["param_groups"]
    if len(groups) != len(mine):
        raise ValueError(f"the optimizer state has {len(groups)} param groups, but this optimizer has {len(mine)}")
    for number, (group, own) in enumerate(zip(groups, mine, strict=True)):
        params = group.get("params", ())
        if len(params) != len(own["params"]):
            raise ValueError(
                f"param group {number} of the optimizer state has {len(params)} parameters, but this optimizer's has "
                f"{len(own['params'])}: it comes from another model"
            )
        for name, default in defaults.items():
            if name not in own:
                continue  # torch adds to the defaults whenever it has loaded something
            if name not in group:
                raise ValueError(
                    f"param group {number} of the optimizer state has no {name!r}: it comes from another optimizer, or was "
                    "changed by hand"
                )
            _check_option(f"{name!r} of param group {number} of the optimizer state", name, group[name], default)
    if "scaler" in state_dict:
        _check_scaler(state_dict["scaler"])


def _check_option(what: str, name: str, value: Any, default: Any) -> None:
    """Numbers stay numbers, pairs of numbers pairs. Whatever else an option is, is the optimizer's business. So is a limit that
    is infinite where nothing is limited."""
    if _is_number(default):
        if not _is_number(value) or (math.isfinite(default) and not math.isfinite(value)):
            raise ValueError(f"{what} is {value!r}, expected a number")
        if name in NOT_NEGATIVE and float(value) < 0:
            raise ValueError(f"{what} is {value!r}, expected a number that is not negative")
    elif isinstance(default, tuple) and default and all(map(_is_number, default)):
        fits = isinstance(value, tuple | list) and len(value) == len(default)
        if not fits or not all(_is_number(part) and math.isfinite(part) for part in value):
            raise ValueError(f"{what} is {value!r}, expected {len(default)} numbers")
        if name == "betas" and not all(0 <= part < 1 for part in value):
            raise ValueError(f"{what} is {value!r}, expected numbers from 0 to below 1")


def _check_scaler(entry: Any) -> None:
    scale: Any = entry.get("scale") if isinstance(entry, Mapping) else None
    if not _is_number(scale) or not math.isfinite(scale) or scale <= 0 or not _is_number(entry.get("good_steps")):
        raise ValueError(f"the loss scale of the optimizer state is {entry!r}, expected a positive 'scale' and 'good_steps'")


def check_step(what: str, value: Any) -> None:
    """ValueError unless it counts steps."""
    if not _is_number(value) or not math.isfinite(value) or value < 0 or int(value) != value:
        raise ValueError(f"{what} is {value!r}, expected a number of steps")


def check_finite(what: str, value: torch.Tensor) -> None:
    """ValueError where a state has values with which every further step would give NaN."""
    if value.is_floating_point() and not bool(value.isfinite().all()):
        bad = int((~value.isfinite()).sum())
        raise ValueError(f"{what} has {bad} values that are not finite: the run that saved it had diverged")


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)
