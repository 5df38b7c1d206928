"""``unwall.load``."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from unwall.checkpoint.block_reading import BlockReading
from unwall.checkpoint.boxes import Box, Part
from unwall.checkpoint.directory import find
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.expanded import fill_expanded
from unwall.checkpoint.generators import check_generators, write_generators
from unwall.checkpoint.goals import Goal
from unwall.checkpoint.lots import CHUNK_ELEMENTS
from unwall.checkpoint.manifest import Manifest, Tensor
from unwall.checkpoint.matching import Matched, check_value, match
from unwall.checkpoint.meeting import Meeting
from unwall.checkpoint.names import Names, names_of
from unwall.checkpoint.once import MASTER, Key, masters, read_again, read_once, states_of
from unwall.checkpoint.optimizer_entry import apply_entry, check_values
from unwall.checkpoint.reader import CheckpointFiles
from unwall.checkpoint.restoring import Restorer, lacks_master, master_homes
from unwall.checkpoint.save import begin
from unwall.checkpoint.stages import Stages, meet_stages
from unwall.checkpoint.trained import Optimizers, Trained, check_optimizers
from unwall.checkpoint.tree import decode, tensors_in
from unwall.checkpoint.validation import read_manifest
from unwall.checkpoint.waiting import Waiting
from unwall.optim.wrap import Wrapped
from unwall.runtime.early_writes import refuse_early_write
from unwall.runtime.engine import Engine
from unwall.shards.master import make_master
from unwall.shards.states import StateSpec


@dataclass
class _Prepared:
    """All that a load needs to know before it changes anything."""

    files: CheckpointFiles
    names: Names
    optimizers: Trained
    matched: Matched
    stages: Stages
    small: dict[str, torch.Tensor]
    """Values, by name."""
    buffers: dict[str, torch.Tensor]
    trees: dict[str, Any]
    restorer: Restorer
    waiting: dict[Key, Waiting]
    """What is read once. See [Note: once] in waiting.py."""

    @property
    def manifest(self) -> Manifest:
        return self.files.manifest


def load_engine(path: str | os.PathLike[str], engine: Engine, model: nn.Module, optimizers: Optimizers) -> Any:
    """See ``unwall.load``."""
    error: BaseException | None = None
    meeting = begin(engine, "load")
    prepared = _prepare(Path(path), engine, meeting, model, optimizers)
    try:
        with prepared.files:
            _restore(engine, prepared)
    except BaseException as failure:
        failure.add_note(f"the model holds a part of {prepared.files.directory} now: load it again before training goes on")
        error = failure
    meeting.agree(error)
    return prepared.trees["extra"]


def _prepare(path: Path, engine: Engine, meeting: Meeting, model: nn.Module, optimizers: Optimizers) -> _Prepared:
    """Finds, matches and verifies. Changes nothing; what is wrong on one rank is an error on all."""
    error: BaseException | None = None
    directory = Path(meeting.together(lambda: str(find(path)) if meeting.rank == 0 else None)[0])
    stages = meet_stages(engine, meeting, model, optimizers)
    prepared: _Prepared | None = None
    try:
        try:
            prepared = _match(directory, engine, model, optimizers, stages)
            prepared.waiting = read_once(engine, prepared.restorer, prepared.matched, prepared.optimizers)
        except BaseException as failure:
            error = failure
        mine = ([], []) if prepared is None else (list(prepared.waiting), list(prepared.optimizers))
        answers = meeting.agree(error, mine)
        assert prepared is not None
        try:
            _check_alike([names for _, names in answers])
            everywhere = set.intersection(*(set(answers[rank][0]) for rank in stages.peers))
            for key in [key for key in prepared.waiting if key not in everywhere]:
                prepared.waiting.pop(key).forgo()
            _forget(engine)
            _verify(engine, prepared, meeting)
        except BaseException as failure:
            error = failure
        meeting.agree(error)
    except BaseException as failure:
        kept = meeting.after_failure([] if prepared is None else _undo(prepared))
        if any(kept.values()):
            raise RuntimeError(_not_undone(kept, failure, directory)) from failure
        raise
    return prepared


def _check_alike(optimizers: list[list[str]]) -> None:
    """CheckpointError where ranks have not given the same optimizers: some would go on with moments of their own."""
    for rank, names in enumerate(optimizers):
        if set(names) != set(optimizers[0]):
            told = [", ".join(map(repr, of)) if any(of) else "one" if of else "none" for of in (names, optimizers[0])]
            what = f"on rank {rank} {told[0]}, on rank 0 {told[1]}"
            raise CheckpointError(f"optimizers given to load: {what}. Give all ranks the same")


def _undo(prepared: _Prepared) -> list[str]:
    """Whatever was read is forgotten: what waits beside the states first, which cannot fail. Gives an error for each state that
    could not be set back to its first values: the others have been."""
    prepared.files.close()
    kept: list[str] = []
    for waiting in sorted(prepared.waiting.values(), key=lambda waiting: waiting.spares is None):
        try:
            waiting.undo()
        except BaseException as error:  # an interrupt, too: the other ranks wait for what this one has to say
            kept.append(str(error) or type(error).__name__)
    prepared.waiting.clear()
    return kept


def _not_undone(kept: dict[int, list[str]], failure: BaseException, directory: Path) -> str:
    """The message where a load failed, and some ranks could not set back what they had read. All ranks raise it."""
    ranks = [f"on rank {rank} {len(errors)} states ({'; '.join(errors)})" for rank, errors in kept.items() if errors]
    return (
        f"{failure}. But what had been read by then could not be set back: {', '.join(ranks)} hold a part of {directory} now. "
        "Load a checkpoint before training goes on"
    )


def _match(directory: Path, engine: Engine, model: nn.Module, optimizers: Optimizers, stages: Stages) -> _Prepared:
    names = names_of(model, engine)
    trained = check_optimizers(optimizers, engine)
    if engine.lent:
        raise RuntimeError("unwall.load inside unwall.full_params: leave the context first")
    refuse_early_write(engine, model.parameters(), "unwall.load")
    if engine.averaged:
        raise RuntimeError("unwall.load inside ema.swap() would load into the averages: leave the context first")
    engine.finish()
    manifest = read_manifest(directory)
    matched = match(manifest, engine, names, trained, stages, str(directory))
    files = CheckpointFiles(directory, manifest)
    return _Prepared(files, names, trained, matched, stages, {}, {}, {}, Restorer(engine.tiers, files), {})


def _verify(engine: Engine, prepared: _Prepared, meeting: Meeting) -> None:
    """Reads what is read once, and verifies everything: the ranks share what is to be read again."""
    files, peers = prepared.files, prepared.stages.peers
    again = read_again(engine, prepared.matched, prepared.waiting)
    files.keeps = True
    files.verify(again, peers.index(meeting.rank), len(peers))
    files.keeps = False
    BlockReading(files, (state.goal for state in prepared.waiting.values())).run()
    if peers[0] == meeting.rank:
        _check_twins(files, prepared.matched.twins)
    _read_small(prepared, meeting)


def _check_twins(files: CheckpointFiles, twins: Iterable[tuple[Tensor, Tensor]]) -> None:
    """CheckpointError where two tensors that are one parameter here have different values: one of them would be lost."""
    for pair in twins:
        numel = torch.Size(pair[0].shape).numel()
        same = len({(tensor.shape, tensor.dtype) for tensor in pair}) == 1
        for low in range(0, numel if same else 0, CHUNK_ELEMENTS):
            part = Part(Box.whole(pair[0].shape), low, min(CHUNK_ELEMENTS, numel - low))
            first, second = (torch.empty(part.numel, dtype=tensor.dtype) for tensor in pair)
            files.read(pair[0], part, first)
            files.read(pair[1], part, second)
            same &= torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        if not same:
            raise CheckpointError(
                f"{files.directory} is of another model: {pair[0].name} and {pair[1].name} have different values in it, and "
                "are tied here. Load it into a model where they are not"
            )


def _read_small(prepared: _Prepared, meeting: Meeting) -> None:
    """Values, buffers and trees: everything that is not a state of a group."""
    files, matched = prepared.files, prepared.matched
    manifest = files.manifest
    files.verify([*matched.values.values(), *matched.buffers.values()])  # another rank's share of them, too
    small = {name: files.read_whole(tensor) for name, tensor in matched.values.items()}
    buffers = {name: files.read_whole(tensor) for name, tensor in matched.buffers.items()}
    for name, value in buffers.items():
        check_value(matched.buffers[name], value, prepared.names.buffers[name], str(files.directory))
    same = manifest.world_size == meeting.size
    mine = manifest.ranks[0], manifest.ranks[meeting.rank] if same else {}
    trees = {name: value for tree in mine if isinstance(tree, dict) for name, value in tree.items()}
    absent = [name for name in ("rng", "extra", "modules") if name not in trees]
    if absent:
        raise CheckpointError(f"{files.directory} has no {absent[0]} of rank {meeting.rank} in it: the manifest is damaged")
    if not same:
        trees["rng"] = None
    entries = manifest.optimizers.values() if prepared.optimizers else ()
    options = [tree for entry in entries for tree in (*(options for _, options in entry.groups), *entry.params.values())]
    missing = [name for name in tensors_in([trees, options]) if name not in small]
    if missing:
        raise CheckpointError(f"{files.directory}: {missing[0]} refers to a tensor that is not there: the manifest is damaged")
    try:
        decoded = {name: decode(tree, small.__getitem__) for name, tree in trees.items()}
        decoded["modules"] = _states_of_modules(prepared, decoded["modules"] or {}, small)
        if decoded["rng"] is not None:
            check_generators(decoded["rng"])
        for name, optimizer in prepared.optimizers.items():
            check_values(manifest.optimizers[name], optimizer, prepared.names.of, small.__getitem__)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{files.directory} cannot be loaded: {type(error).__name__}: {error}") from error
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
    matched, names = prepared.matched, prepared.names
    for name, optimizer in prepared.optimizers.items():
        if isinstance(optimizer, Wrapped):
            _keep_more(name, optimizer, matched)
    _forget(engine)
    prepared.restorer.load(_goals(engine, prepared))
    for waiting in prepared.waiting.values():
        waiting.install()
    with torch.no_grad():
        for param in names.params.values():
            if id(param) not in engine.places:
                param.copy_(prepared.files.read_whole(matched.params[id(param)]))
        for name, buffer in names.buffers.items():
            fill_expanded(buffer, prepared.buffers[name])
    for path, module in names.states.items():
        module.set_extra_state(prepared.trees["modules"][path])
    for group in engine.groups:
        engine.executor.invalidate(group.index)
        increment_version(group.params)
    restored = {*names.params, *names.buffers}
    engine.unwritten = {key: name for key, name in engine.unwritten.items() if name not in restored}
    for name, optimizer in prepared.optimizers.items():
        apply_entry(prepared.manifest.optimizers[name], optimizer, names.of, prepared.small.__getitem__)
    if prepared.trees["rng"] is not None:
        write_generators(prepared.trees["rng"], engine.device.device)
        engine.ranks.steps = prepared.trees["rng"].get("sums", 0)


def _forget(engine: Engine) -> None:
    """What was computed from the states as they are is of no use any more."""
    engine.version += 1
    for group in engine.groups:
        group.generation += 1


def _goals(engine: Engine, prepared: _Prepared) -> Iterator[Goal]:
    """What is read again. Backwards: see [Note: twice] in reader.py."""
    matched, restorer = prepared.matched, prepared.restorer
    for group in reversed(engine.groups):
        for name, optimizer in prepared.optimizers.items():
            for state, found in states_of(group, matched, name, optimizer):
                if (group.index, name, state.spec.name) not in prepared.waiting:
                    yield restorer.state(group, found, state)
        if (group.index, *MASTER) not in prepared.waiting:
            tensors = masters(group, matched)
            if lacks_master(group, tensors):
                make_master(group)
            yield restorer.master(group, tensors, [home.held for home in master_homes(group)])


def _keep_more(called: str, optimizer: Wrapped, matched: Matched) -> None:
    """The saved options ask for states that the optimizer does not keep as it is."""
    new: dict[int, dict[str, StateSpec]] = {}
    for (param, owner, state), tensor in matched.states.items():
        if owner == called and state not in optimizer.rule.kept[param]:
            new.setdefault(param, {})[state] = StateSpec(state, tensor.dtype)
    for param, specs in new.items():
        optimizer.rule.kept[param] = {**optimizer.rule.kept[param], **specs}
    if new:
        optimizer._make_room()
