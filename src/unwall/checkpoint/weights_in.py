"""``load_weights``: from files of weights straight into shards.

[Note: streaming]
Each rank goes through its owned runs, stretch by stretch (window.py). For each stretch it reads what the files hold of it, in
the background and a few stretches ahead, and writes it where the states live. So a rank reads the bytes that it owns, and a
few stretches are all the memory that it takes. Where every rank owns everything (stage 0), each reads its share of a stretch
and the shares are exchanged: every byte is read by one rank. A tensor rank owns elements of its boxes of a parameter, and a
pipeline rank those of its layers: names that other stages hold are theirs to find.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.modules.module import _IncompatibleKeys

from unwall.checkpoint.agree import agree, begin
from unwall.checkpoint.expanded import check_expanded, fill_expanded
from unwall.checkpoint.find_weights import open_weights
from unwall.checkpoint.inventory import Held, aliases, inventory, owner_of, plain
from unwall.checkpoint.naming import Named, from_files, missing_names
from unwall.checkpoint.progress import Advance, progress
from unwall.checkpoint.reading import Source
from unwall.checkpoint.save import finish_pending
from unwall.checkpoint.spread import local_matches
from unwall.checkpoint.weight_files import WeightFiles, describe
from unwall.checkpoint.window import STRETCH_ELEMENTS, stretches, window
from unwall.runtime.early_writes import refuse_early_write
from unwall.runtime.engine import Engine
from unwall.shards.collectives import Ranks
from unwall.shards.group import Group
from unwall.shards.local import local

READERS = max(3, min(8, (os.cpu_count() or 1) // 2))
"""Stretches that are read at once, ahead of what is being written: a drive, and memory that is touched for the first time, want
several at once."""


class Matched(NamedTuple):
    """Files and a model that fit together."""

    files: WeightFiles
    sources: dict[int, Source]
    """Where each tensor (by id) comes from."""
    held: dict[str, Held]
    keys: _IncompatibleKeys


class Found(NamedTuple):
    """What the files hold for a model, before anybody has judged it."""

    files: WeightFiles
    held: dict[str, Held]
    named: Named
    missing: list[str]
    errors: list[str]

    def over_stages(self, ranks: Ranks) -> "Found":
        """What is missing on any rank, and what no rank has a use for. All ranks call it together."""
        every = ranks.every((self.named.unexpected, self.missing))
        unexpected = [name for name in self.named.unexpected if all(name in theirs for theirs, _ in every)]
        missing = list(dict.fromkeys(name for _, theirs in every for name in theirs))
        return self._replace(named=replace(self.named, unexpected=unexpected), missing=missing)


def match_weights(model: nn.Module, path: str | os.PathLike[str], strict: bool) -> Matched:
    """Checks all names, shapes and dtypes. RuntimeError, as from ``load_state_dict``, where they do not fit."""
    return _checked(plain(model), _find(plain(model), path), path, strict)


def _find(model: nn.Module, path: str | os.PathLike[str]) -> Found:
    files, held = open_weights(path), inventory(model)
    named = from_files(model, held, {name: entry.shape for name, entry in files.entries.items()})
    errors = list(named.errors)
    for name, made in named.made.items():
        used = [files.entries[far] for far in dict.fromkeys(patch.source for patch in made.patches)]
        if made.shape != held[name].shape:
            there = ", ".join(f"{describe(entry)} in {entry.path.name}" for entry in used[:4])
            errors.append(
                f"size mismatch for {name}: {list(made.shape)} is in the files ({there}), {list(held[name].shape)} in the model"
            )
        for entry in used:
            if _kind(entry.dtype) != _kind(held[name].dtype):
                wanted = str(held[name].dtype).removeprefix("torch.")
                errors.append(f"dtype mismatch for {name}: {entry.path.name} has {describe(entry)}, the model {wanted}")
    return Found(files, held, named, missing_names(model, held, named.made), errors)


def _checked(model: nn.Module, found: Found, path: str | os.PathLike[str], strict: bool) -> Matched:
    files, held, named, missing, errors = found
    if strict and named.unexpected:
        errors.insert(0, f"Unexpected key(s) in state_dict: {_quoted(named.unexpected)}.")
    if strict and missing:
        errors.insert(0, f"Missing key(s) in state_dict: {_quoted(missing)}.")
    if errors:
        listed = "\n\t".join(errors)
        raise RuntimeError(f"Error(s) in loading {os.fspath(path)} for {type(model).__name__}:\n\t{listed}")
    sources = {}
    for name, known in held.items():  # of several names of a tensor the last one counts, as in load_state_dict
        if name in named.made:
            matches = local_matches(known.tensor, named.made[name].matches())
            sources[id(known.tensor)] = Source(files, matches, local(known.tensor).numel(), known.dtype)
    if named.rules:
        model._weight_conversions = named.rules  # type: ignore[assignment]  # save_pretrained asks for it
    return Matched(files, sources, held, _IncompatibleKeys(missing, named.unexpected))


def _match_together(model: nn.Module, engine: Engine | None, path: str | os.PathLike[str], strict: bool, what: str) -> Matched:
    """What is wrong on one rank is an error on all."""
    ranks = None if engine is None else engine.everyone
    error: Exception | None = None
    found: Found | None = None
    matched: Matched | None = None
    try:
        found = _find(model, path)
    except Exception as failure:
        error = failure
    if engine is not None and engine.others.pipeline:
        agree(ranks, error, what)
        assert found is not None
        found = found.over_stages(engine.everyone)
    try:
        matched = None if found is None else _checked(model, found, path, strict)
    except Exception as failure:
        error = failure
    agree(ranks, error, what)
    assert matched is not None
    return matched


def stream_in(model: nn.Module, path: str | os.PathLike[str], strict: bool) -> _IncompatibleKeys:
    """Loads weights into a model that has memory: a sharded one, or a plain one."""
    engine = owner_of(model)
    ranks = None if engine is None else engine.everyone
    if engine is not None:
        if engine.lent or engine.loading:
            raise RuntimeError("weights cannot be loaded inside unwall.full_params: leave the context first")
        refuse_early_write(engine, model.parameters(), "unwall.load_weights")
        if engine.averaged:
            raise RuntimeError("weights would go into the averages inside ema.swap(): leave the context first")
        failure = finish_pending(engine)  # it reads what is about to change
        begin(engine, "unwall.load_weights")
        agree(ranks, failure, "the save before")
    what = f"loading weights from {os.fspath(path)}"
    error: Exception | None = None
    matched = _match_together(plain(model), engine, path, strict, what)
    rank = 0 if ranks is None else ranks.rank
    total = sum(source.nbytes for source in matched.sources.values()) // (1 if engine is None else engine.ranks.size)
    try:
        with torch.no_grad(), progress("loading weights", total, rank) as advance:
            if engine is not None:
                error = _Streaming(engine, matched, advance).run()
            if error is None:
                _fill_rest(matched, engine, advance)
    except Exception as found:
        error = found
    finally:
        matched.files.close()
    if engine is not None and error is None:
        _note_written(engine, matched)
    if error is not None:
        error.add_note("some of the model's weights were loaded before this: load again before using it")
    agree(ranks, error, what)
    return matched.keys


def _note_written(engine: Engine, matched: Matched) -> None:
    """What came from the meta device has values now."""
    for entry in matched.held.values():
        if id(entry.tensor) in matched.sources:
            engine.unwritten.pop((id(entry.owner), entry.attribute) if entry.is_buffer else id(entry.tensor), None)


class _Piece(NamedTuple):
    """Elements of a parameter that lie in a stretch."""

    run_start: int
    """Their place in the owned run."""
    start: int
    """Their place in the flattened parameter."""
    numel: int
    source: Source


class _Streaming:
    """See [Note: streaming]."""

    def __init__(self, engine: Engine, matched: Matched, advance: Advance) -> None:
        self._engine = engine
        self._sources = matched.sources
        self._advance = advance
        self._error: Exception | None = None

    def run(self) -> Exception | None:
        """Gives the error back instead of raising it: the ranks go through exchanges together until the end."""
        engine = self._engine
        groups = [group for group in engine.groups if any(id(param) in self._sources for param in group.params)]
        work: deque[tuple[Group, int, int, list[_Piece], Future[list[torch.Tensor]]]] = deque()
        with ThreadPoolExecutor(READERS, thread_name_prefix="unwall weights") as readers:
            for group in groups:
                for start, stop in stretches(group):
                    pieces = list(self._pieces(group, start, stop))
                    if pieces:
                        work.append((group, start, stop, pieces, readers.submit(self._read, group, pieces)))
                    if len(work) > READERS:
                        self._write(*work.popleft())
            while work:
                self._write(*work.popleft())
        engine.groups[0].pending.staging.close()
        engine.version += 1
        for group in groups:
            group.generation += 1
            engine.executor.invalidate(group.index)
            increment_version(group.params)  # a backward through the old values says so
        return self._error

    def _pieces(self, group: Group, start: int, stop: int) -> Iterator[_Piece]:
        for segment in group.owned_segments():
            source = self._sources.get(id(group.params[segment.slot]))
            low, high = max(start, segment.shard_start), min(stop, segment.shard_start + segment.numel)
            if source is not None and low < high:
                yield _Piece(low, segment.start + low - segment.shard_start, high - low, source)

    def _shared(self, group: Group) -> bool:
        """Every rank owns all of it."""
        return self._engine.ranks.size > 1 and group.own_numel == group.layout.padded_numel

    def _read(self, group: Group, pieces: list[_Piece]) -> list[torch.Tensor]:
        if not self._shared(group):
            return [piece.source.read(piece.start, piece.start + piece.numel) for piece in pieces]
        return [_share(self._engine.ranks, piece) for piece in pieces]

    def _write(self, group: Group, start: int, stop: int, pieces: list[_Piece], reading: "Future[list[torch.Tensor]]") -> None:
        values: list[torch.Tensor] | None = None
        try:
            values = reading.result()
        except Exception as error:
            self._error = self._error or error
        if self._shared(group):
            values = [self._whole(piece, None if values is None else values[at]) for at, piece in enumerate(pieces)]
        if self._error is not None or values is None:
            return
        try:
            with window(self._engine.tiers, group, start, stop, write=True) as goal:
                for piece, value in zip(pieces, values, strict=True):
                    goal.put(piece.run_start, value)
        except Exception as error:
            self._error = error
        self._advance(sum(value.nbytes for value in values))

    def _whole(self, piece: _Piece, share: torch.Tensor | None) -> torch.Tensor:
        """A piece, put together from every rank's share of it."""
        ranks = self._engine.ranks
        length = -(-piece.numel // ranks.size)
        if share is None:  # it could not be read: the others are told at the end
            share = torch.zeros(length, dtype=piece.source.dtype)
        whole = torch.empty(length * ranks.size, dtype=piece.source.dtype)
        ranks.all_gather_on_host(whole.view(torch.uint8), share.view(torch.uint8))
        return whole[: piece.numel]


def _share(ranks: Ranks, piece: _Piece) -> torch.Tensor:
    """The 1/N of a piece that this rank reads, in a tensor of the same size on every rank."""
    length = -(-piece.numel // ranks.size)
    low = min(ranks.rank * length, piece.numel)
    high = min(low + length, piece.numel)
    values = piece.source.read(piece.start + low, piece.start + high)
    return torch.cat([values, values.new_zeros(length - (high - low))]) if high - low < length else values


def _fill_rest(matched: Matched, engine: Engine | None, advance: Advance) -> None:
    """Buffers, and parameters that are not sharded."""
    for names in aliases(matched.held).values():
        entry = matched.held[names[0]]
        source = matched.sources.get(id(entry.tensor))
        if source is None or (engine is not None and id(entry.tensor) in engine.places):
            continue
        goal = entry.tensor
        if goal.is_meta:  # a buffer that has no memory yet
            goal = torch.empty_like(goal, device="cpu" if engine is None else engine.device.device)
            for name in names:
                matched.held[name].owner._buffers[matched.held[name].attribute] = goal
        _fill_plain(local(goal), source, names[0])
        advance(source.nbytes)


def _fill_plain(goal: torch.Tensor, source: Source, name: str) -> None:
    if not goal.is_contiguous():
        values = source.read(0, source.numel).view(goal.shape)
        check_expanded(goal, values, name)
        fill_expanded(goal, values)
        return
    flat = goal.view(-1)
    for low in range(0, source.numel, STRETCH_ELEMENTS):
        high = min(source.numel, low + STRETCH_ELEMENTS)
        flat[low:high].copy_(source.read(low, high))


_KINDS: tuple[tuple[str, Callable[[torch.dtype], bool]], ...] = (
    ("complex", lambda dtype: dtype.is_complex),
    ("quantised", lambda dtype: dtype.is_floating_point and dtype.itemsize == 1),
    ("float", lambda dtype: dtype.is_floating_point),
    ("bool", lambda dtype: dtype is torch.bool),
)


def _kind(dtype: torch.dtype) -> str:
    """What can be converted into each other without changing what it means."""
    return next((name for name, test in _KINDS if test(dtype)), "integer")


def _quoted(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
