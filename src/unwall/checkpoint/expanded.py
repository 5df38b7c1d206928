"""Values for tensors that ``expand`` made: several elements of them are one place in memory, which is written once."""

import torch


def check_expanded(target: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """ValueError where elements of ``values`` differ that are one place of ``target``, which is as large."""
    kept = _one_of_each(target, values)
    if kept.shape != values.shape and values.numel() and not _same_bits(kept.expand_as(values), values):
        raise ValueError(
            f"{name} is an expanded tensor here, all its values along a dimension are one place in memory: it cannot hold "
            "values that differ. Register a clone() of it"
        )


def fill_expanded(target: torch.Tensor, values: torch.Tensor) -> None:
    """``target`` takes the values, which ``check_expanded`` has seen; they may be of another dtype and device."""
    _one_of_each(target, target).copy_(_one_of_each(target, values))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN is the same as NaN."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _one_of_each(target: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The part of ``found`` that is as large as what ``target`` is in memory."""
    for dim, (extent, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and extent > 1:
            found = found.narrow(dim, 0, 1)
    return found
