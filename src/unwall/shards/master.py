"""The fp32 master of a group's owned run, in the smallest lossless form.

fp32 compute: the parameters are the master. bf16 compute: the bf16 parameters plus a 16-bit remainder,
``bits(master) = (half << 16) + remainder``. fp16 compute: an fp32 copy beside the parameters. With lean states only the upper
byte of the remainder is kept, rounded to nearest; the half is the same.

[Note: pieces]
Taking fp32 apart and joining it makes a handful of temporaries of four bytes per element. For a whole group they would take
more memory than its states, just when the device is full; so both are done piece by piece.
"""

from collections.abc import Iterator

import torch

from unwall.native.pool import WorkerPool
from unwall.shards.group import Group
from unwall.shards.states import LEAN_REMAINDER, MASTER, REMAINDER, StateSpec, master_specs

PIECE_ELEMENTS = 1 << 22
"""See [Note: pieces]."""


def make_master(group: Group) -> None:
    """The states that the group's master needs beyond its parameters, as they are before anything was written."""
    for spec in master_specs(group.layout.dtype, group.lean):
        group.store(spec)


def set_lean(group: Group, lean: bool) -> None:
    """Keeps a bf16 group's master in 24 bits, or in 32 again. The parameters stay as they are. No update may be under way."""
    if group.lean == lean or group.layout.dtype is not torch.bfloat16:
        return
    if group.has_state(REMAINDER):
        group.pending.settle()
        group.pending.staging.close()
        spec: StateSpec = LEAN_REMAINDER if lean else REMAINDER
        made = group.make_store(spec)
        old, new = group.state(REMAINDER, write=False), made.tensor()
        for piece in _pieces(old.numel()):
            new[piece].copy_(_narrowed(old[piece]) if lean else _widened(old[piece]))
        group.pending.staging.close()
        group.states[REMAINDER.key()].await_reader()
        group.free_state(REMAINDER.key())
        group.states[REMAINDER.key()] = made
        group.generation += 1
    group.lean = lean


def write_master(group: Group, start: int, values: torch.Tensor) -> None:
    """Sets owned elements from ``start`` on, parameters and master, to ``values`` (any float dtype, flat)."""
    span = slice(start, start + values.numel())
    target = group.own_param[span]
    if group.layout.dtype is torch.bfloat16:
        keep_rest = group.has_state(REMAINDER) or values.dtype is not torch.bfloat16
        rest = group.state(REMAINDER)[span] if keep_rest else None
        split_into(target, rest, values, group.pool)
        return
    if group.layout.dtype is torch.float16:
        group.state(MASTER)[span].copy_(values)
    target.copy_(values)


def read_master(group: Group, device: torch.device | None = None, start: int = 0, end: int | None = None) -> torch.Tensor:
    """Owned elements from ``start`` to ``end`` in full precision: fp32, or the parameters' own dtype where that is the master.

    ``device``: where it will be needed. A split master crosses a link in halves and is joined there."""
    span = slice(start, end)
    if group.has_state(MASTER):
        return group.state(MASTER, write=False)[span]
    half = group.own_param_for(write=False)[span]
    if not group.has_state(REMAINDER):
        return half
    remainder = group.state(REMAINDER, write=False)[span]
    if device is not None and device.type != "cpu":
        return join(half.to(device), remainder.to(device))
    return join(half, remainder, group.pool)


def clear_master(group: Group, start: int, numel: int) -> None:
    """Owned elements without a value yet: NaN until they are loaded."""
    span = slice(start, start + numel)
    for tensor in (group.own_param, *([group.state(MASTER)] if group.has_state(MASTER) else [])):
        tensor[span].fill_(float("nan") if tensor.dtype.is_floating_point else 0)
    if group.has_state(REMAINDER):
        group.state(REMAINDER)[span].zero_()


def split_into(half: torch.Tensor, rest: torch.Tensor | None, values: torch.Tensor, pool: WorkerPool | None = None) -> None:
    """Flat values, wherever they are, as half and remainder, split where they are: fewer bytes cross the link."""
    if rest is not None and rest.dtype is torch.int8:
        for piece in _pieces(values.numel()):
            wide = torch.empty(half[piece].shape, dtype=torch.int16, device=half.device)
            split_into(half[piece], wide, values[piece], pool)
            rest[piece].copy_(_narrowed(wide))
        return
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


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values as the parameters show them: for bf16 the half of the split master, whose ties round away from zero."""
    if dtype is not torch.bfloat16 or values.dtype is not torch.float32:
        return values.to(dtype)
    half = torch.empty(values.shape, dtype=dtype, device=values.device)
    split_into(half.view(-1), None, values.reshape(-1))
    return half


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 as a bf16 half and a 16-bit remainder."""
    bits = values.contiguous().view(torch.int32)
    bits = torch.where(values.isnan(), 0x7FC00000, bits)  # a NaN's payload could carry into the sign
    high = (bits + 0x8000) >> 16
    remainder = (bits - (high << 16)).to(torch.int16)
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join(half: torch.Tensor, remainder: torch.Tensor, pool: WorkerPool | None = None) -> torch.Tensor:
    """The fp32 values that ``split`` took apart. ``pool``: does it where they are in host memory."""
    remainder = whole_remainder(remainder)
    if pool is not None and half.device.type == "cpu":
        whole = torch.empty(half.numel(), dtype=torch.float32)
        pool.join(whole.data_ptr(), half.data_ptr(), remainder.data_ptr(), half.numel(), keep=(half, remainder)).wait()
        return whole
    bits = torch.empty(half.numel(), dtype=torch.int32, device=half.device)
    for piece in _pieces(half.numel()):
        torch.add(half[piece].view(torch.int16).to(torch.int32) << 16, remainder[piece], out=bits[piece])
    return bits.view(torch.float32)


def whole_remainder(remainder: torch.Tensor) -> torch.Tensor:
    """In 16 bits, as ``join`` needs it, also where only the upper byte is kept."""
    return _widened(remainder) if remainder.dtype is torch.int8 else remainder


def _widened(upper: torch.Tensor) -> torch.Tensor:
    return upper.to(torch.int16) << 8


def _narrowed(remainder: torch.Tensor) -> torch.Tensor:
    """The nearest upper byte that leaves the half as it is."""
    return ((remainder.to(torch.int32) + 128) >> 8).clamp_(max=127).to(torch.int8)


def _pieces(numel: int) -> Iterator[slice]:
    """See [Note: pieces]."""
    for start in range(0, numel, PIECE_ELEMENTS):
        yield slice(start, start + PIECE_ELEMENTS)
