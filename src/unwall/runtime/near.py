"""What a parameter is while a pass shows it: a plain one that tells of writes."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unwall.runtime.absent import is_absent, keeper_of, plain_class_of
from unwall.runtime.tensor_functions import IN_PLACE_OPERATORS

T = torch.Tensor


class Near(nn.Parameter):
    """The class of a parameter that a pass shows: a plain one, but that it tells who reads ``.data``, which counts writes apart
    from the parameter."""

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """Code that builds another parameter of the same type gets a plain one."""
        return nn.Parameter(*args, **kwargs)

    @property
    def data(self) -> torch.Tensor:
        result: torch.Tensor = T.data.__get__(self)  # type: ignore[attr-defined]
        keeper = keeper_of(self)
        if keeper is not None:
            keeper.read_data(self, result)
        return result

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        T.data.__set__(self, value)  # type: ignore[attr-defined]


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method in place that tells before it writes."""

    @functools.wraps(method)
    def write(self: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        keeper = keeper_of(self)
        if keeper is not None:
            keeper.about_to_write(self)
        return method(self, *args, **kwargs)

    return write


_NO_WRITES = ("requires_grad_", "retain_grad_", "share_memory_", "rename_", "detach_", "resize_", "resize_as_", "set_")
for _name in (*(name for name in dir(T) if name.endswith("_") and not name.startswith("_")), *IN_PLACE_OPERATORS):
    if _name not in _NO_WRITES and callable(getattr(T, _name, None)):
        setattr(Near, _name, _telling(getattr(T, _name)))


def become_plain(param: nn.Parameter) -> None:
    """For whoever shows a parameter something."""
    if is_absent(param) or isinstance(param, Near):
        object.__setattr__(param, "__class__", nn.Parameter if isinstance(param, Near) else plain_class_of(param))
