"""The fp32 master of a group's owned run, in the smallest lossless form.

fp32 compute: the parameters are the master. bf16 compute: the bf16 parameters plus a 16-bit remainder,
``bits(master) = (half << 16) + remainder``. fp16 compute: an fp32 copy beside the parameters.
"""

import torch

from unwall.shards.group import Group

REMAINDER = "remainder"
MASTER = "master"


def master_bytes(dtype: torch.dtype) -> int:
    """Bytes an element of the master takes beyond the parameter itself."""
    return {torch.bfloat16: 2, torch.float16: 4}.get(dtype, 0)


def write_master(group: Group, start: int, values: torch.Tensor) -> None:
    """Sets owned elements from ``start`` on, parameters and master, to ``values`` (any float dtype, flat)."""
    span = slice(start, start + values.numel())
    target = group.own_param[span]
    if group.layout.dtype is torch.bfloat16:
        if group.has_state(MASTER):
            group.state(MASTER, torch.float32)[span].copy_(values)
            target.copy_(values)
            return
        half, remainder = split(values.to(target.device, torch.float32))
        target.copy_(half)
        if group.has_state(REMAINDER) or values.dtype is not torch.bfloat16:
            group.state(REMAINDER, torch.int16)[span].copy_(remainder)
        return
    if group.layout.dtype is torch.float16:
        group.state(MASTER, torch.float32)[span].copy_(values)
    target.copy_(values)


def read_master(group: Group) -> torch.Tensor:
    """The owned run in full precision: fp32, or the parameters' own dtype where that is the master."""
    if group.has_state(MASTER):
        return group.state(MASTER, torch.float32)
    if group.has_state(REMAINDER):
        return join(group.own_param, group.state(REMAINDER, torch.int16))
    return group.own_param


def widen_master(group: Group) -> torch.Tensor:
    """Turns the master into an fp32 tensor that a torch optimizer can update, and returns it."""
    if group.layout.dtype not in (torch.bfloat16, torch.float16):
        return group.own_param
    if not group.has_state(MASTER):
        values = read_master(group).float()
        group.state(MASTER, torch.float32).copy_(values)
        if group.has_state(REMAINDER):
            group.free_state(REMAINDER)
    return group.state(MASTER, torch.float32)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values as the parameters show them: for bf16 the half of the split master, whose ties round away from zero."""
    return split(values)[0] if dtype is torch.bfloat16 and values.dtype is torch.float32 else values.to(dtype)


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 as a bf16 half and a 16-bit remainder."""
    bits = values.contiguous().view(torch.int32)
    bits = torch.where(values.isnan(), 0x7FC00000, bits)  # a NaN's payload could carry into the sign
    high = (bits + 0x8000) >> 16
    remainder = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join(half: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 values that ``split`` took apart."""
    return ((half.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)
