"""What would help when nothing fits: memory, ranks, a disk, fewer bytes, shorter samples. Each is tried, not guessed."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unwall.planner.candidates import DEVICE_SHARE, Allowance, Candidate, Short, build, device_room, shortage
from unwall.planner.fewer_bytes import leaner
from unwall.planner.hardware import Hardware
from unwall.planner.outline import Outline
from unwall.runtime.resources import HOST_SHARE
from unwall.tiers.sizes import format_bytes, readable_bytes, written_bytes

MORE_NODES = (2, 4, 8, 16, 32, 64, 128)
MORE_TILES = (2, 4, 8, 16, 32, 64)
MOST_GROUPS = 1 << 13
"""That are tried: looking at more takes minutes."""


def remedies(
    place: Candidate, outline: Outline, hardware: Hardware, ranks: int, allowance: Allowance, dtype: torch.dtype
) -> list[str]:
    """What would make ``place`` (the placement that asks least of the device) fit, in words."""

    def lack(candidate: Candidate, many: int, given: Allowance) -> Short | str | None:
        if device_room(candidate, outline, given) <= 0:
            return "activations"
        return shortage(build(candidate, outline, many, given, dtype, hardware)[1], given)

    found = [*_budgets(place, ranks, allowance, lack)]
    if not allowance.together:
        found += [*_host(place, hardware, ranks, allowance, lack), *_ranks(place, ranks, allowance, lack)]
    if allowance.directory is None or not allowance.disk_bytes:
        found += _disk(place, ranks, allowance, lack)
    found += _tiles(place, outline, ranks, allowance, lack)
    found += [words for words, fewer in leaner(place, ranks, dtype) if lack(fewer, ranks, allowance) is None]
    return [*found, *_device(place, ranks, allowance, lack), *_shorter(place, ranks, allowance, lack)]


Lack = Callable[[Candidate, int, Allowance], "Short | str | None"]
_PLENTY = 1 << 62


def _budgets(place: Candidate, ranks: int, allowance: Allowance, lack: Lack) -> Iterator[str]:
    """The budgets of the user's that are too small."""
    theirs = {
        "device_budget_bytes": allowance.device_budget_bytes is not None,
        "host_bytes": allowance.host_given,
        "disk_bytes": allowance.disk_given and allowance.directory is not None,
    }
    names = [name for name, given in theirs.items() if given]

    def fits(**changed: int) -> bool:
        given: dict[str, Any] = changed
        return lack(place, ranks, dataclasses.replace(allowance, **given)) is None

    def least(name: str, **others: int) -> int:
        return _least(lambda nbytes: fits(**others | {name: nbytes}), getattr(allowance, name))

    alone = [name for name in names if fits(**{name: _PLENTY})]
    for name in alone:
        yield _budget(name, least(name), allowance)
    plenty = dict.fromkeys(names, _PLENTY)
    if not alone and len(names) > 1 and fits(**plenty):  # several of them are too small
        for name in names:
            del plenty[name]
            if not fits(**plenty):
                plenty[name] = least(name, **plenty)
        yield " with ".join(_budget(name, nbytes, allowance) for name, nbytes in plenty.items())


def _budget(name: str, nbytes: int, allowance: Allowance) -> str:
    return f"{name.replace('_budget', '')}={_short(nbytes)!r} (it is {format_bytes(getattr(allowance, name))})"


def _least(fits: Callable[[int], bool], low: int) -> int:
    """About the least number of bytes above ``low`` that fits. Groups change with a budget, so it is searched for."""
    high = max(2 * low, 1 << 20)
    while not fits(high):
        low, high = high, 2 * high
    while high - low > max(1 << 20, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _short(nbytes: int) -> str:
    """At least that many bytes, as one writes them."""
    return written_bytes(readable_bytes(nbytes + nbytes // 99 + 1))


def _host(place: Candidate, hardware: Hardware, ranks: int, allowance: Allowance, lack: Lack) -> Iterator[str]:
    if "disk" in place.fields:
        return
    if lack(place, ranks, dataclasses.replace(allowance, host_bytes=_PLENTY)) is not None:
        return
    short = lack(place, ranks, allowance)
    if isinstance(short, Short) and short.tier == "host":
        node = int(short.needed_bytes * min(ranks, hardware.devices_per_node) / HOST_SHARE)
        yield f"{format_bytes(node)} of host memory per node (there are {format_bytes(hardware.host_bytes)})"


def _ranks(place: Candidate, ranks: int, allowance: Allowance, lack: Lack) -> Iterator[str]:
    for times in MORE_NODES:
        if lack(place, ranks * times, allowance) is None:
            yield f"{ranks * times} ranks instead of {ranks} ({times} times the machines)"
            return


def _disk(place: Candidate, ranks: int, allowance: Allowance, lack: Lack) -> Iterator[str]:
    spill = dataclasses.replace(place, fields={"stage": 3, **dict.fromkeys(("params", "grads", "optimizer", "disk"), "disk")})
    given = dataclasses.replace(allowance, directory="disk", disk_bytes=_PLENTY)
    if lack(spill, ranks, given) is not None:
        return
    short = lack(spill, ranks, dataclasses.replace(given, disk_bytes=0))
    if isinstance(short, Short):
        yield f"a disk with {format_bytes(short.needed_bytes)} per rank: disk='/path/on/a/fast/drive'"


def _tiles(place: Candidate, outline: Outline, ranks: int, allowance: Allowance, lack: Lack) -> Iterator[str]:
    """Where the user names a number. Without one weights are cut as far as that helps, up to some thousand tiles in all."""
    params = sum(1 for _ in outline.module.parameters())
    for tiles in MORE_TILES:
        if tiles <= (place.fields.get("tiles") or 1) or tiles * params > MOST_GROUPS:
            continue
        if lack(dataclasses.replace(place, fields=place.fields | {"tiles": tiles}), ranks, allowance) is None:
            yield f"all weights in {tiles} tiles: tiles={tiles}"
            return


def _device(place: Candidate, ranks: int, allowance: Allowance, lack: Lack) -> Iterator[str]:
    if (
        allowance.device_budget_bytes is not None
        or lack(place, ranks, dataclasses.replace(allowance, device_bytes=_PLENTY)) is not None
    ):
        return
    high = _least(
        lambda size: lack(place, ranks, dataclasses.replace(allowance, device_bytes=size)) is None, allowance.device_bytes
    )
    wanted, there = (format_bytes(int(nbytes / DEVICE_SHARE)) for nbytes in (high, allowance.device_bytes))
    yield f"devices with {wanted} (they have {there})"


def _shorter(place: Candidate, ranks: int, allowance: Allowance, lack: Lack) -> Iterator[str]:
    length = place.workload.seq // 2
    while length >= 1:
        if lack(dataclasses.replace(place, workload=dataclasses.replace(place.workload, seq=length)), ranks, allowance) is None:
            yield f"samples of {length} tokens instead of {place.workload.seq}"
            return
        length //= 2
