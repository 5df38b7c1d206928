"""The fp32 master of a group's owned run, in the smallest lossless form.

fp32 compute: the parameters are the master. bf16 compute: the bf16 parameters plus a 16-bit remainder,
``bits(master) = (half << 16) + remainder``. fp16 compute: an fp32 copy beside the parameters.

[Note: pieces]
Taking fp32 apart and joining it makes a handful of temporaries of four bytes an element. For a whole group they would take
more memory than its states, just when the device is full; so both are done piece by piece.
"""

from collections.abc import Iterator

import torch

from unwall.native.pool import WorkerPool
from unwall.shards.group import Group

REMAINDER = "remainder"
MASTER = "master"
PIECE_ELEMENTS = 1 << 22
"""See [Note: pieces]."""


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
        keep_rest = group.has_state(REMAINDER) or values.dtype is not torch.bfloat16
        rest = group.state(REMAINDER, torch.int16)[span] if keep_rest else None
        _split_into(target, rest, values, group.pool)
        return
    if group.layout.dtype is torch.float16:
        group.state(MASTER, torch.float32)[span].copy_(values)
    target.copy_(values)


def read_master(group: Group, device: torch.device | None = None, start: int = 0, end: int | None = None) -> torch.Tensor:
    """Owned elements from ``start`` to ``end`` in full precision: fp32, or the parameters' own dtype where that is the master.

    ``device``: where it will be needed. A split master crosses a link in halves and is joined there."""
    span = slice(start, end)
    if group.has_state(MASTER):
        return group.state(MASTER, torch.float32, write=False)[span]
    half = group.own_param_for(write=False)[span]
    if not group.has_state(REMAINDER):
        return half
    remainder = group.state(REMAINDER, torch.int16, write=False)[span]
    if device is not None and device.type != "cpu":
        return join(half.to(device), remainder.to(device))
    if half.device.type != "cpu":
        return join(half, remainder)
    whole = torch.empty(half.numel(), dtype=torch.float32)
    group.pool.join(whole.data_ptr(), half.data_ptr(), remainder.data_ptr(), half.numel(), keep=(half, remainder)).wait()
    return whole


def clear_master(group: Group, start: int, numel: int) -> None:
    """Owned elements without a value yet: NaN until they are loaded."""
    span = slice(start, start + numel)
    for tensor in (group.own_param, *([group.state(MASTER, torch.float32)] if group.has_state(MASTER) else [])):
        tensor[span].fill_(float("nan") if tensor.dtype.is_floating_point else 0)
    if group.has_state(REMAINDER):
        group.state(REMAINDER, torch.int16)[span].zero_()


def _split_into(half: torch.Tensor, rest: torch.Tensor | None, values: torch.Tensor, pool: WorkerPool | None = None) -> None:
    """Flat values, wherever they are, as half and remainder, split where they are: fewer bytes cross the link."""
    if pool is not None and rest is not None and values.device.type == half.device.type == "cpu":
        values = values.float().contiguous()
        keep = (half, rest, values)
        pool.split(half.data_ptr(), rest.data_ptr(), values.data_ptr(), values.numel(), keep=keep).wait()
        return
    for piece in _pieces(values.numel()):
        upper, lower = split(values[piece].float())
        half[piece].copy_(upper)
        if rest is not None:
            rest[piece].copy_(lower)


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
    if dtype is not torch.bfloat16 or values.dtype is not torch.float32:
        return values.to(dtype)
    half = torch.empty(values.shape, dtype=dtype, device=values.device)
    _split_into(half.view(-1), None, values.reshape(-1))
    return half


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 as a bf16 half and a 16-bit remainder."""
    bits = values.contiguous().view(torch.int32)
    bits = torch.where(values.isnan(), 0x7FC00000, bits)  # a NaN's payload could carry into the sign
    high = (bits + 0x8000) >> 16
    remainder = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join(half: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 values that ``split`` took apart."""
    bits = torch.empty(half.numel(), dtype=torch.int32, device=half.device)
    for piece in _pieces(half.numel()):
        torch.add(half[piece].view(torch.int16).to(torch.int32) << 16, remainder[piece], out=bits[piece])
    return bits.view(torch.float32)


def _pieces(numel: int) -> Iterator[slice]:
    """See [Note: pieces]."""
    for start in range(0, numel, PIECE_ELEMENTS):
        yield slice(start, start + PIECE_ELEMENTS)
