"""Lean states in torch operations: what their bytes mean, on any device. See [Note: lean format] in native/cpp/lean_impl.hpp.

The update of host memory is native, that of an accelerator Triton's; this is how states become fp32 and fp32 becomes states
(state dicts, checkpoints), and the update where neither can run. All of it gives the bits of the native kernel.
"""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from unwall.native.lean import BLOCK, read_lean, write_lean
from unwall.native.pool import AdamWStep
from unwall.shards.master import join
from unwall.tiers.workers import shared_pool

PIECE_ELEMENTS = 1 << 20
"""Worked on at once: there are a dozen temporaries of four or eight bytes per element."""

_CARRIERS = 8
_SCALE_BIAS = 40
_MOST_ROOT = 2.0**58
_LEAST_PRODUCT = 2.0**-126
_MOST_RATIO = 15.5
_SHIFT = 19
_ONE = 1 << 23
_ROOT_REBIAS = 112 << 23
_RATIO_REBIAS = 123 << 23
_WORD = 0xFFFFFFFF
_NEAREST = 1 << (_SHIFT - 1)


@dataclass(frozen=True, kw_only=True)
class LeanNumbers:
    """The constants of a step, rounded to fp32 as those of the native kernel are."""

    key: int
    """Of the random bits: 32 bits without a sign."""
    grad_scale: float
    beta1: float
    weight1: float
    beta2: float
    weight2: float
    unbias: float
    eps: float
    keep: float
    rate: float

    @staticmethod
    def of(step: AdamWStep) -> "LeanNumbers":
        return LeanNumbers(
            key=(step.step * 0x27D4EB2F) & _WORD,
            grad_scale=_f32(step.grad_scale),
            beta1=_f32(step.beta1),
            weight1=_f32(1 - step.beta1),
            beta2=_f32(step.beta2),
            weight2=_f32(1 - step.beta2),
            unbias=_f32(1 / math.sqrt(1 - step.beta2**step.step)),
            eps=_f32(step.eps),
            keep=_f32(1 - step.lr * step.weight_decay),
            rate=_f32(step.lr / (1 - step.beta1**step.step)),
        )


def read_moments(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp_avg`` and ``exp_avg_sq`` in fp32, of whole blocks."""
    root, ratio = _unpack(moments)
    return ratio * root, root * root


def read_moment(moments: torch.Tensor, name: str) -> torch.Tensor:
    """One of the two by its name, of whole blocks."""
    found = torch.empty(moments.numel(), dtype=torch.float32, device=moments.device)
    if moments.device.type == "cpu":
        read_lean(shared_pool(), found.data_ptr(), moments.data_ptr(), bool(_which(name)), moments.numel()).wait()
        return found
    for piece in _pieces(moments.numel()):
        found[piece].copy_(read_moments(moments[piece])[_which(name)])
    return found


def write_moment(moments: torch.Tensor, name: str, values: torch.Tensor) -> None:
    """Sets one of the two, in place, to the nearest that there is. Both are to be set: ``exp_avg_sq`` first, because
    ``exp_avg`` is kept in proportion to it."""
    if moments.device.type == "cpu":
        values = values.to("cpu", torch.float32).contiguous()
        write_lean(shared_pool(), moments.data_ptr(), values.data_ptr(), bool(_which(name)), moments.numel()).wait()
        return
    for piece in _pieces(moments.numel()):
        both = list(read_moments(moments[piece]))
        both[_which(name)] = values[piece].to(moments.device, torch.float32)
        root = _sqrt(both[1])
        ratio = torch.where(root > 0, both[0] / root, 0.0)
        moments[piece].copy_(_pack(root, ratio, None))


def lean_update(
    half: torch.Tensor,
    remainder: torch.Tensor,
    moments: torch.Tensor,
    grad: torch.Tensor,
    step: AdamWStep,
    factor: torch.Tensor | None = None,
) -> None:
    """One AdamW step in place, with the bits of the native kernel. ``moments`` holds whole blocks. ``factor``: multiplies the
    gradients on top of ``step.grad_scale``."""
    numbers = LeanNumbers.of(step)
    for piece in _pieces(half.numel()):
        numel = half[piece].numel()
        param = join(half[piece], remainder[piece])
        raw = grad[piece].float()
        _update_piece(half[piece], remainder[piece], moments[piece], _padded(param), _padded(raw), numel, numbers, factor)


def _update_piece(
    half: torch.Tensor,
    remainder: torch.Tensor,
    moments: torch.Tensor,
    param: torch.Tensor,
    raw: torch.Tensor,
    numel: int,
    numbers: LeanNumbers,
    factor: torch.Tensor | None,
) -> None:
    root, ratio = _unpack(moments)
    noise = _mixed(((_bits(param) * 0x9E3779B1) & _WORD) + (_bits(raw) ^ numbers.key) & _WORD)
    g = raw * numbers.grad_scale
    if factor is not None:
        g = g * factor
    m = numbers.beta1 * (ratio * root) + numbers.weight1 * g
    v = numbers.beta2 * (root * root) + numbers.weight2 * g * g
    root = _sqrt(v)
    bounded = torch.where(root < _MOST_ROOT, root, _MOST_ROOT)
    below = bounded * numbers.unbias + numbers.eps
    product = bounded * below
    shared = m / torch.where(product > _LEAST_PRODUCT, product, _LEAST_PRODUCT)
    param = param * numbers.keep - numbers.rate * (bounded * shared)
    ratio = below * shared
    moments.copy_(_pack(root, ratio, noise))
    bits = torch.where(param.isnan(), (_bits(param) & 0x80000000) | 0x7FC00000, _bits(param))
    bits = (bits + ((noise >> 12) & 0xFF)) & 0xFFFFFF00
    high = (bits + 0x8000) >> 16
    half.copy_(high.to(torch.int16).view(torch.bfloat16)[:numel])
    remainder.copy_(((bits - (high << 16)) >> 8).to(torch.int8)[:numel])


def _unpack(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Roots and ratios of whole blocks."""
    codes = moments.to(torch.int32).view(-1, BLOCK) & 0xFFFF
    lanes = torch.arange(BLOCK, device=moments.device, dtype=torch.int32)
    carried = ((codes[:, :_CARRIERS] & 1) << lanes[:_CARRIERS]).sum(1, keepdim=True, dtype=torch.int32)
    scale = ((carried - _SCALE_BIAS + 127) << 23).view(torch.float32)
    size = _widen(codes & _ratio_mask(lanes), _RATIO_REBIAS)
    ratio = torch.where((codes & 0x80) != 0, -size, size)
    return (_widen(codes >> 8, _ROOT_REBIAS) * scale).view(-1), ratio.view(-1)


def _pack(root: torch.Tensor, ratio: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Whole blocks as they are stored. Without ``noise``: rounded to nearest, which leaves what was stored before as it is."""
    root = torch.where(root < _MOST_ROOT, root, 0.0).view(-1, BLOCK)
    ratio = ratio.view(-1, BLOCK)
    lanes = torch.arange(BLOCK, device=root.device)
    low = high = torch.full((), _NEAREST, device=root.device)
    if noise is not None:
        low, high = (noise & ((1 << _SHIFT) - 1)).view(-1, BLOCK), (noise >> (32 - _SHIFT)).view(-1, BLOCK)
    largest = (_bits(root) + low).amax(1, keepdim=True)
    scale = ((largest >> 23) - 127).clamp_(min=-_SCALE_BIAS)
    up = ((127 - scale) << 23).to(torch.int32).view(torch.float32)
    roots = (_narrow(root * up, _ROOT_REBIAS) + low) >> _SHIFT
    size = ratio.abs()
    size = torch.where(size < _MOST_RATIO, size, _MOST_RATIO)
    ratios = (_narrow(size, _RATIO_REBIAS) + torch.where(lanes < _CARRIERS, 2 * high, high)) >> _SHIFT
    ratios = torch.where(roots == 0, 0, ratios.clamp_(max=127) & _ratio_mask(lanes))
    sign = torch.where((ratios != 0) & ratio.signbit(), 0x80, 0)
    codes = (roots << 8) | sign | ratios
    codes[:, :_CARRIERS] |= ((scale + _SCALE_BIAS) >> lanes[:_CARRIERS]) & 1
    return codes.to(torch.int16).view(-1)


def _widen(codes: torch.Tensor, rebias: int) -> torch.Tensor:
    wide = codes << _SHIFT
    smallest = rebias + _ONE
    denormal = (wide + smallest).view(torch.float32) - _float(smallest)
    return torch.where(wide < _ONE, denormal, (wide + rebias).view(torch.float32))


def _narrow(values: torch.Tensor, rebias: int) -> torch.Tensor:
    smallest = _float(rebias + _ONE)
    return torch.where(values < smallest, _bits(values + smallest) - _ONE, _bits(values)) - rebias


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    """Rounded correctly, as torch's own is not everywhere."""
    return values.double().sqrt_().float()


def _mixed(value: torch.Tensor) -> torch.Tensor:
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _WORD
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _WORD
    return value ^ (value >> 16)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Of floats, as whole numbers that are not negative."""
    return values.contiguous().view(torch.int32).to(torch.int64) & _WORD


def _float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def _f32(value: float) -> float:
    """Rounded as a constant of the native kernel is."""
    return ctypes.c_float(value).value


def _ratio_mask(lanes: torch.Tensor) -> torch.Tensor:
    return torch.where(lanes < _CARRIERS, 0x7E, 0x7F).to(lanes.dtype)


def _which(name: str) -> int:
    return ("exp_avg", "exp_avg_sq").index(name)


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Zeros behind it, up to whole blocks."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK))


def _pieces(numel: int) -> Iterator[slice]:
    for start in range(0, numel, PIECE_ELEMENTS):
        yield slice(start, start + PIECE_ELEMENTS)
