"""``unwall.load``."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.checkpoint.directory import find
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.generators import write_generators
from unwall.checkpoint.manifest import Manifest
from unwall.checkpoint.matching import Matched, match
from unwall.checkpoint.meeting import Meeting
from unwall.checkpoint.names import Names, names_of
from unwall.checkpoint.optimizer_entry import apply_entry, check_optimizer
from unwall.checkpoint.reader import CheckpointFiles
from unwall.checkpoint.restoring import Goal, Restorer
from unwall.checkpoint.save import finish_pending
from unwall.checkpoint.tree import decode, tensors_in
from unwall.checkpoint.validation import read_manifest
from unwall.optim.sharded import ShardedOptimizer
from unwall.optim.wrap import Wrapped
from unwall.runtime.engine import Engine
from unwall.shards.states import StateSpec


@dataclass
class _Prepared:
    """All that a load needs to know before it changes anything."""

    files: CheckpointFiles
    names: Names
    optimizer: ShardedOptimizer | None
    matched: Matched
    small: dict[str, torch.Tensor]
    """Values, by name."""
    buffers: dict[str, torch.Tensor]
    trees: dict[str, Any]

    @property
    def manifest(self) -> Manifest:
        return self.files.manifest


def load_engine(path: str | os.PathLike[str], engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """See ``unwall.load``."""
    error: BaseException | None = finish_pending(engine)
    engine.executor.together("load")
    meeting = Meeting(engine.everyone)
    meeting.agree(error)
    prepared = _prepare(Path(path), engine, meeting, model, optimizer)
    try:
        with prepared.files:
            _restore(engine, prepared)
    except BaseException as failure:
        failure.add_note(f"the model holds a part of {prepared.files.directory} now: load it again before training goes on")
        error = failure
    meeting.agree(error)
    return prepared.trees["extra"]


def _prepare(
    path: Path, engine: Engine, meeting: Meeting, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> _Prepared:
    """Finds, matches and verifies. Changes nothing; what is wrong on one rank is an error on all."""
    error: BaseException | None = None
    found: Path | None = None
    try:
        found = find(path) if meeting.rank == 0 else None
    except BaseException as failure:
        error = failure
    directory = Path(meeting.agree(error, None if found is None else str(found))[0])
    prepared: _Prepared | None = None
    try:
        names = names_of(model, engine)
        trained = check_optimizer(optimizer, engine)
        if engine.lent:
            raise RuntimeError("unwall.load inside unwall.full_params: leave the context first")
        engine.finish()
        manifest = read_manifest(directory)
        matched = match(manifest, engine, names, trained, str(directory))
        files = CheckpointFiles(directory, manifest)
        files.verify(matched.tensors, meeting.rank, meeting.size)
        prepared = _read_small(files, names, matched, engine, trained)
    except BaseException as failure:
        error = failure
    meeting.agree(error)
    assert prepared is not None
    return prepared


def _read_small(
    files: CheckpointFiles, names: Names, matched: Matched, engine: Engine, optimizer: ShardedOptimizer | None
) -> _Prepared:
    """Values, buffers and trees: everything that is not a state of a group."""
    manifest = files.manifest
    files.verify([*matched.values.values(), *matched.buffers.values()])  # another rank's share of them, too
    small = {name: files.read_whole(tensor) for name, tensor in matched.values.items()}
    buffers = {name: files.read_whole(tensor) for name, tensor in matched.buffers.items()}
    same = manifest.world_size == engine.everyone.size
    trees = dict(manifest.ranks[0]) | (manifest.ranks[engine.everyone.rank] if same else {})
    if not same:
        trees["rng"] = None
    entry = None if optimizer is None else manifest.optimizer
    options = [] if entry is None else [*(options for _, options in entry.groups), *entry.params.values()]
    missing = [name for name in tensors_in([trees, options]) if name not in small]
    if missing:
        raise CheckpointError(f"{files.directory}: {missing[0]} refers to a tensor that is not there: the manifest is damaged")
    decoded = {name: decode(tree, small.__getitem__) for name, tree in trees.items()}
    states = set(decoded["modules"] or {})
    if states != set(names.states):
        other = sorted(states ^ set(names.states))[0]
        raise CheckpointError(f"{files.directory} is of another model: of module {other!r}, one of them has an extra state")
    return _Prepared(files, names, optimizer, matched, small, buffers, decoded)


def _restore(engine: Engine, prepared: _Prepared) -> None:
    matched, names, optimizer = prepared.matched, prepared.names, prepared.optimizer
    if isinstance(optimizer, Wrapped):
        _keep_more(optimizer, matched)
    engine.version += 1
    for group in engine.groups:
        group.generation += 1
    restorer = Restorer(engine.tiers, prepared.files)
    restorer.load(_goals(engine, restorer, matched, optimizer))
    with torch.no_grad():
        for param in names.params.values():
            if id(param) not in engine.places:
                param.copy_(prepared.files.read_whole(matched.params[id(param)]))
        for name, buffer in names.buffers.items():
            buffer.copy_(prepared.buffers[name])
    for path, module in names.states.items():
        module.set_extra_state(prepared.trees["modules"][path])
    for group in engine.groups:
        engine.executor.invalidate(group.index)
        increment_version(group.params)
    restored = {*names.params, *names.buffers}
    engine.unwritten = {key: name for key, name in engine.unwritten.items() if name not in restored}
    if optimizer is not None:
        assert prepared.manifest.optimizer is not None
        apply_entry(prepared.manifest.optimizer, optimizer, names.of, prepared.small.__getitem__)
    if prepared.trees["rng"] is not None:
        write_generators(prepared.trees["rng"], engine.device.device)


def _goals(engine: Engine, restorer: Restorer, matched: Matched, optimizer: ShardedOptimizer | None) -> Iterator[Goal]:
    """Backwards: see [Note: twice] in reader.py."""
    stepped = {param for param, _ in matched.states}
    for group in reversed(engine.groups):
        slots = dict(enumerate(group.params))
        if optimizer is not None:
            kept = any(key.owner == optimizer.own.owner for key in group.states)  # not of frozen parameters
            specs = optimizer.rule.specs(group) if kept or any(id(param) in stepped for param in group.params) else ()
            for spec, store in zip(specs, optimizer.own.stores(group, specs).values(), strict=True):
                found = {slot: matched.states.get((id(param), spec.name)) for slot, param in slots.items()}
                states = {slot: tensor for slot, tensor in found.items() if tensor is not None}
                yield restorer.state(group, states, store, spec.initial)
        yield restorer.master(group, {slot: matched.params[id(param)] for slot, param in slots.items()})


def _keep_more(optimizer: Wrapped, matched: Matched) -> None:
    """The saved options ask for states that the optimizer does not keep as it is."""
    new: dict[int, dict[str, StateSpec]] = {}
    for (param, state), tensor in matched.states.items():
        if state not in optimizer.rule.kept[param]:
            new.setdefault(param, {})[state] = StateSpec(state, tensor.dtype)
    for param, specs in new.items():
        optimizer.rule.kept[param] = {**optimizer.rule.kept[param], **specs}
    if new:
        optimizer._make_room()
