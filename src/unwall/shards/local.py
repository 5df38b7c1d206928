"""A parameter's local part: the tensor itself or, under tensor parallelism, what a DTensor holds on this rank.

What lies in a slot is always the local part. The functions here are the only ones that know the difference.
"""

import torch
from torch import nn


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Its class is imported only where there is one: that takes as long as the rest of unwall."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter, its shape and its storage."""
    if not is_distributed(tensor):
        return tensor
    part = tensor._local_tensor  # type: ignore[attr-defined]
    assert isinstance(part, torch.Tensor)
    return part


def show(param: nn.Parameter, view: torch.Tensor) -> None:
    """The parameter's local part becomes ``view``. The ``nn.Parameter`` object stays; setting ``.data`` of a DTensor would be
    silently ignored."""
    if is_distributed(param):
        param._local_tensor = view  # type: ignore[attr-defined]
    else:
        param.data = view


def local_gradient(param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient that autograd finished, laid out as the parameter is: a norm's gradient arrives as a sum
    that is still open, an embedding's as a whole."""
    if is_distributed(param):
        placed: torch.Tensor = grad.redistribute(param.device_mesh, param.placements).to_local()  # type: ignore[attr-defined]
        return placed
    return grad.full_tensor() if is_distributed(grad) else grad  # type: ignore[attr-defined]
