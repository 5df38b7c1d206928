"""A parameter's local part: the tensor itself or, under tensor parallelism, what a DTensor holds on this rank.

What lies in a slot is always the local part. The functions here are the only ones that know the difference.

[Note: two faces of a DTensor]
A DTensor is a wrapper (global shape, dtype) around a local tensor. Setting ``.data`` changes the wrapper alone, setting
``_local_tensor`` what is inside alone. A parameter that computes in another dtype than it was given in needs both: the wrapper
says what autograd and the rules of DTensor believe. In-place operations count on the wrapper's version, not on the inside's.
"""

import math
from typing import Any

import torch
from torch import nn


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Its class is imported only where there is one: that takes as long as the rest of unwall."""
    kind = type(tensor)
    known = _distributed.get(kind)
    if known is None:
        known = _distributed[kind] = hasattr(kind, "_local_tensor") and hasattr(kind, "placements")
    return known


_distributed: dict[type, bool] = {torch.Tensor: False}
"""What is known of each class."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter, its shape and its storage."""
    if not is_distributed(tensor):
        return tensor
    part = tensor._local_tensor  # type: ignore[attr-defined]
    assert isinstance(part, torch.Tensor)
    return part


def show(param: nn.Parameter, view: torch.Tensor) -> None:
    """The parameter's local part becomes ``view``. The ``nn.Parameter`` object stays. See [Note: two faces of a DTensor]."""
    if not is_distributed(param):
        param.data = view
        return
    if local(param).dtype is not view.dtype:
        wrapper: Any = distributed_like(param, view)
        torch.Tensor.data.__set__(param, wrapper)  # type: ignore[attr-defined]
        param._spec = wrapper._spec  # type: ignore[attr-defined]
    # With a version counter of its own: what a forward takes out of the DTensor (``to_local``) is saved with that one, and the
    # flat buffer's counts fetches, too.
    param._local_tensor = view.data  # type: ignore[attr-defined]


def distributed_like(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """``part`` as the local part of a tensor that is spread as ``param`` is. A plain parameter: ``part`` as it is."""
    if not is_distributed(param):
        return part
    from torch.distributed.tensor import DTensor

    with torch._C.DisableTorchFunctionSubclass():
        shape, stride = param.shape, param.stride()
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def whole_over_tensor_ranks(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """All elements of a parameter (or of a state of it) of which every tensor rank gives its local part. A collective of the
    tensor ranks for a DTensor."""
    if not is_distributed(param):
        return part
    with torch.no_grad():
        whole: torch.Tensor = distributed_like(param, part).full_tensor()  # type: ignore[attr-defined]
    return whole


def local_part_of(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's local part of a whole value that every rank has (no collective), or of a DTensor."""
    if not is_distributed(param):
        return whole.full_tensor() if is_distributed(whole) else whole  # type: ignore[attr-defined]
    if is_distributed(whole):
        return whole.detach().redistribute(param.device_mesh, param.placements)._local_tensor  # type: ignore[attr-defined, no-any-return]
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    with torch.no_grad():
        spread: Any = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return spread._local_tensor.to(whole.device).contiguous()  # type: ignore[no-any-return]


def local_gradient(param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient that autograd finished, laid out as the parameter is: a norm's gradient arrives as a sum
    that is still open, an embedding's as a whole."""
    if is_distributed(param):
        if not is_distributed(grad):
            return grad
        placed: torch.Tensor = grad.redistribute(param.device_mesh, param.placements).to_local()  # type: ignore[attr-defined]
        return placed
    return grad.full_tensor() if is_distributed(grad) else grad  # type: ignore[attr-defined]


def copies_of(param: torch.Tensor, tensor_ranks: int) -> int:
    """On how many of the ranks that hold one data-parallel part of the model each element of a parameter is kept."""
    if not is_distributed(param):
        return tensor_ranks
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return math.prod(mesh.size(at) for at, placed in enumerate(placements) if placed.is_replicate())


def made_real(param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """A parameter leaves the meta device. It cannot be given real data: what is inside the object is exchanged."""
    part: torch.Tensor = torch.empty((), dtype=dtype, device=device)
    if is_distributed(param):
        part = distributed_like(param, part.expand(local(param).shape))
    torch.utils.swap_tensors(param, nn.Parameter(part, param.requires_grad))
