"""``unwall.load``."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.checkpoint.checked_reading import read_checked
from unwall.checkpoint.directory import find
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.generators import write_generators
from unwall.checkpoint.manifest import Manifest, Tensor
from unwall.checkpoint.matching import Matched, match
from unwall.checkpoint.meeting import Meeting
from unwall.checkpoint.names import Names, names_of
from unwall.checkpoint.optimizer_entry import apply_entry, check_optimizer
from unwall.checkpoint.reader import CheckpointFiles
from unwall.checkpoint.restoring import Fresh, Goal, Restorer, fresh_state
from unwall.checkpoint.save import begin
from unwall.checkpoint.stages import Stages, meet_stages
from unwall.checkpoint.tree import decode, tensors_in
from unwall.checkpoint.validation import read_manifest
from unwall.optim.adamw import AdamW
from unwall.optim.seen_states import SeenState, seen_specs, seen_states
from unwall.optim.sharded import ShardedOptimizer
from unwall.optim.wrap import Wrapped
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.states import StateSpec


@dataclass
class _Prepared:
    """All that a load needs to know before it changes anything."""

    files: CheckpointFiles
    names: Names
    optimizer: ShardedOptimizer | None
    matched: Matched
    stages: Stages
    small: dict[str, torch.Tensor]
    """Values, by name."""
    buffers: dict[str, torch.Tensor]
    trees: dict[str, Any]
    read: set[tuple[int, str]]
    """States of groups that have their values already. See [Note: once]."""

    @property
    def manifest(self) -> Manifest:
        return self.files.manifest


def load_engine(path: str | os.PathLike[str], engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
    """See ``unwall.load``."""
    error: BaseException | None = None
    meeting = begin(engine, "load")
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
    directory = Path(meeting.together(lambda: str(find(path)) if meeting.rank == 0 else None)[0])
    stages = meet_stages(engine, meeting, model, optimizer)
    prepared: _Prepared | None = None
    fresh: dict[tuple[int, str], Fresh] = {}
    try:
        prepared = _match(directory, engine, model, optimizer, stages)
        fresh = _fresh(engine, prepared)
    except BaseException as failure:
        error = failure
    answers = meeting.agree(error, list(fresh))
    everywhere = set.intersection(*(set(answers[rank]) for rank in stages.peers))
    assert prepared is not None
    fresh = {key: state for key, state in fresh.items() if key in everywhere}
    try:
        _forget(engine)
        _verify(prepared, fresh, meeting)
    except BaseException as failure:
        error = failure
    try:
        meeting.agree(error)
    except BaseException:
        prepared.files.close()
        for state in fresh.values():
            state.undo()
        raise
    prepared.read = everywhere
    return prepared


def _match(
    directory: Path, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer | None, stages: Stages
) -> _Prepared:
    names = names_of(model, engine)
    trained = check_optimizer(optimizer, engine)
    if engine.lent:
        raise RuntimeError("unwall.load inside unwall.full_params: leave the context first")
    engine.finish()
    manifest = read_manifest(directory)
    matched = match(manifest, engine, names, trained, stages, str(directory))
    return _Prepared(CheckpointFiles(directory, manifest), names, trained, matched, stages, {}, {}, {}, set())


def _fresh(engine: Engine, prepared: _Prepared) -> dict[tuple[int, str], Fresh]:
    """States that can be read into their places before everything is verified, by group and name. See [Note: once]."""
    optimizer = prepared.optimizer
    if not isinstance(optimizer, AdamW) or any("step" in entry for entry in optimizer.state.values()):
        return {}
    found = {}
    for group in engine.groups:
        if any(key.owner == optimizer.own.owner for key in group.states):
            for seen, tensors in _states(group, prepared.matched, optimizer):
                state = None if seen.coded else fresh_state(group, tensors, seen.store, seen.spec.initial)
                if state is not None:
                    found[group.index, seen.spec.name] = state
    return found


def _verify(prepared: _Prepared, fresh: dict[tuple[int, str], Fresh], meeting: Meeting) -> None:
    """Reads what is fresh, and verifies everything: the ranks share what is to be read again."""
    once = {id(tensor) for state in fresh.values() for tensor in state.tensors.values()}
    files = prepared.files
    files.keeps = True
    peers = prepared.stages.peers
    unread = [tensor for tensor in prepared.matched.tensors if id(tensor) not in once]
    files.verify(unread, peers.index(meeting.rank), len(peers))
    read_checked(files, (wanted for state in fresh.values() for wanted in state.wanted()))
    files.keeps = False
    _read_small(prepared, meeting)


def _read_small(prepared: _Prepared, meeting: Meeting) -> None:
    """Values, buffers and trees: everything that is not a state of a group."""
    files, matched, optimizer = prepared.files, prepared.matched, prepared.optimizer
    manifest = files.manifest
    files.verify([*matched.values.values(), *matched.buffers.values()])  # another rank's share of them, too
    small = {name: files.read_whole(tensor) for name, tensor in matched.values.items()}
    buffers = {name: files.read_whole(tensor) for name, tensor in matched.buffers.items()}
    same = manifest.world_size == meeting.size
    trees = dict(manifest.ranks[0]) | (manifest.ranks[meeting.rank] if same else {})
    if not same:
        trees["rng"] = None
    entry = None if optimizer is None else manifest.optimizer
    options = [] if entry is None else [*(options for _, options in entry.groups), *entry.params.values()]
    missing = [name for name in tensors_in([trees, options]) if name not in small]
    if missing:
        raise CheckpointError(f"{files.directory}: {missing[0]} refers to a tensor that is not there: the manifest is damaged")
    decoded = {name: decode(tree, small.__getitem__) for name, tree in trees.items()}
    decoded["modules"] = _states_of_modules(prepared, decoded["modules"] or {}, small)
    prepared.small, prepared.buffers, prepared.trees = small, buffers, decoded


def _states_of_modules(prepared: _Prepared, found: dict[str, Any], small: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What modules hold beside their tensors, by their names. Each pipeline stage has written its own."""
    wanted = set(prepared.names.states)
    for tree in prepared.manifest.ranks if wanted - set(found) else ():
        if "modules" in tree and set(tensors_in(tree["modules"])) <= set(small):
            found = (decode(tree["modules"], small.__getitem__) or {}) | found
    other = sorted((wanted - set(found)) | (set(found) - wanted - prepared.stages.states))
    if other:
        where = prepared.files.directory
        raise CheckpointError(f"{where} is of another model: of module {other[0]!r}, one of them has an extra state")
    return found


def _restore(engine: Engine, prepared: _Prepared) -> None:
    matched, names, optimizer = prepared.matched, prepared.names, prepared.optimizer
    if isinstance(optimizer, Wrapped):
        _keep_more(optimizer, matched)
    _forget(engine)
    restorer = Restorer(engine.tiers, prepared.files)
    restorer.load(_goals(engine, restorer, prepared))
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
        engine.ranks.steps = prepared.trees["rng"].get("sums", 0)


def _forget(engine: Engine) -> None:
    """What was computed from the states as they are is of no use any more."""
    engine.version += 1
    for group in engine.groups:
        group.generation += 1


def _goals(engine: Engine, restorer: Restorer, prepared: _Prepared) -> Iterator[Goal]:
    """Backwards: see [Note: twice] in reader.py."""
    matched, optimizer = prepared.matched, prepared.optimizer
    for group in reversed(engine.groups):
        if optimizer is not None:
            for state, tensors in _states(group, matched, optimizer):
                if (group.index, state.spec.name) not in prepared.read:
                    yield restorer.state(group, tensors, state)
        yield restorer.master(group, {slot: matched.params[id(param)] for slot, param in enumerate(group.params)})


def _states(group: Group, matched: Matched, optimizer: ShardedOptimizer) -> Iterator[tuple[SeenState, dict[int, Tensor]]]:
    """Every state that an optimizer keeps of a group, and of each slot that is in the checkpoint its tensor."""
    kept = any(key.owner == optimizer.own.owner for key in group.states)  # not of frozen parameters
    names = [spec.name for spec in seen_specs(optimizer.rule, group)]
    stepped = any((id(param), name) in matched.states for param in group.params for name in names)
    for state in seen_states(optimizer.rule, optimizer.own, group) if kept or stepped else ():
        found = {slot: matched.states.get((id(param), state.spec.name)) for slot, param in enumerate(group.params)}
        yield state, {slot: tensor for slot, tensor in found.items() if tensor is not None}


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
