"""Dtypes at the edges of modules: what goes in is what the module computes in, what comes out what the plan says."""

from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from unwall.plans import Plan, PlanError
from unwall.runtime.engine import Engine
from unwall.runtime.outputs import cast_all_floats, cast_floats


class Casts:
    """Dtypes at the edge of a module that computes in another one than what surrounds it."""

    def __init__(
        self, outside: torch.dtype, inside: torch.dtype, *, back: bool, output_dtype: torch.dtype | None = None
    ) -> None:
        self.outside = outside
        self._inside = inside
        self._back = back
        self._output_dtype = output_dtype
        self.of_outputs = back or output_dtype is not None
        """Whether there is anything to do for what comes out."""

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not kwargs:
            for arg in args:
                if type(arg) is not _TENSOR or arg.dtype is self.outside:
                    break
            else:  # as most modules are called
                return args, kwargs
        return cast_floats(args, self.outside, self._inside), cast_floats(kwargs, self.outside, self._inside)

    def outputs(self, output: Any) -> Any:
        if self._output_dtype is not None:
            return cast_all_floats(output, self._output_dtype)
        return cast_floats(output, self._inside, self.outside) if self._back else output


_TENSOR = torch.Tensor


def casts_of(engine: Engine, module: nn.Module, own: tuple[nn.Parameter, ...], name: str) -> Casts | None:
    """What happens to dtypes at the edge of a module with these parameters. ``name``: empty for the model itself."""
    compute = engine.plan.compute_dtype
    if parametrize.is_parametrized(module):
        own = (*own, *cast(nn.Module, module.parametrizations).parameters())
    output_dtype = _output_dtype(engine.plan, name, module)
    if compute is torch.float32 or not (own or name == ""):
        return None if output_dtype is None else Casts(compute, compute, back=False, output_dtype=output_dtype)
    if own and all(_kept_fp32(engine, param) for param in own):
        back = not isinstance(module, parametrize.ParametrizationList)  # which gives a parameter
        return Casts(compute, torch.float32, back=back, output_dtype=output_dtype)
    return Casts(torch.float32, compute, back=False, output_dtype=output_dtype)


def _output_dtype(plan: Plan, name: str, module: nn.Module) -> torch.dtype | None:
    wanted = plan.output_dtype
    if wanted is None or isinstance(wanted, torch.dtype):
        return wanted if name == "" else None
    found = wanted(name, module)
    if found is not None and not isinstance(found, torch.dtype):
        raise PlanError(f"output_dtype gives a torch.dtype or None, got {found!r} for module {name!r}")
    return found


def _kept_fp32(engine: Engine, param: nn.Parameter) -> bool:
    if id(param) not in engine.places:
        return param.dtype is torch.float32
    return all(engine.groups[place.group].layout.dtype is torch.float32 for place in engine.places[id(param)])
