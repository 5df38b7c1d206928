"""What this rank puts into a checkpoint, in the order in which it lies in its file, as it is when the save begins.

[Note: who writes what]
Every rank writes its 1/N of each group, also where it holds all of it (stage 0). What is the same on all ranks and small
(buffers, the user's ``extra``) is written by rank 0; another rank writes its own where it differs from rank 0's.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from unwall.checkpoint.boxes import Part
from unwall.checkpoint.checksums import crc
from unwall.checkpoint.generators import read_generators
from unwall.checkpoint.header import header_of
from unwall.checkpoint.lots import Held, Lot, Span, master_lot
from unwall.checkpoint.manifest import FileEntry, Kind, Manifest, OptimizerEntry, Piece, Tensor, file_name
from unwall.checkpoint.names import Names
from unwall.checkpoint.optimizer_entry import entry_of, stored_states
from unwall.checkpoint.spread import parts_of, writes
from unwall.checkpoint.trained import Trained
from unwall.checkpoint.tree import encode
from unwall.optim.seen_states import seen_states
from unwall.optim.sharded import ShardedOptimizer
from unwall.runtime.engine import Engine
from unwall.shards.group import Group
from unwall.shards.layout import Segment


@dataclass
class Contents:
    """One rank's part of a checkpoint."""

    manifest: Manifest
    """Of this rank alone, its pieces without checksums."""
    file: str
    pieces: list[tuple[Tensor, Piece]]
    """In the order of the file."""
    small: list[torch.Tensor]
    """The first ones, copied."""
    lots: list[Lot]
    """The others."""
    header: bytes

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self.header) + sum(tensor.nbytes(piece) for tensor, piece in self.pieces)

    def written(self, crcs: dict[int, list[int]]) -> Manifest:
        """The manifest of this rank with the checksums of what was written."""
        found: dict[int, list[Piece]] = {}
        for number, (tensor, piece) in enumerate(self.pieces):
            found.setdefault(id(tensor), []).append(replace(piece, crcs=tuple(crcs.get(number, ()))))
        tensors = tuple(replace(tensor, pieces=tuple(found.get(id(tensor), ()))) for tensor in self.manifest.tensors)
        entry = FileEntry(self.nbytes, len(self.header), crc(self.header))
        return replace(self.manifest, tensors=tensors, files={self.file: entry})


@dataclass
class Small:
    """What a rank has beside the states of groups: everything in it is a copy."""

    tensors: list[tuple[Kind, str, torch.Tensor]] = field(default_factory=list)
    trees: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, OptimizerEntry] = field(default_factory=dict)

    def digests(self) -> dict[str, Any]:
        """What tells whether another rank has the same."""
        found: dict[str, Any] = {f"{kind}/{name}": _digest(value) for kind, name, value in self.tensors}
        entries = [
            f"{name} {entry.kind} with {[options for _, options in entry.groups]}".strip()
            for name, entry in self.optimizers.items()
        ]
        found["optimizer"] = ", ".join(entries) or "none"
        return {**found, **{f"tree/{name}": _digest_of_tree(tree) for name, tree in self.trees.items()}}


def take_small(engine: Engine, names: Names, optimizers: Trained, extra: Any) -> Small:
    """Copies everything that is not a state of a group."""
    small = Small()

    def keep(where: str, tensor: torch.Tensor) -> str:
        small.tensors.append(("value", where, _copied(tensor)))
        return where

    for name, param in names.params.items():
        if id(param) not in engine.places:  # it came into the model after it was sharded
            small.tensors.append(("param", name, _copied(param)))
    small.tensors += [("buffer", name, _copied(buffer)) for name, buffer in names.buffers.items()]
    modules = {path: module.get_extra_state() for path, module in names.states.items()}
    small.trees = {
        "rng": encode({**read_generators(engine.device.device), "sums": engine.ranks.steps}, "rng", keep),
        "extra": encode(extra, "extra", keep),
        "modules": encode(modules, "modules", keep),
    }
    for name, optimizer in optimizers.items():
        small.optimizers[name] = entry_of(optimizer, names.of, keep, f"optimizers[{name}]" if name else "optimizer")
    return small


def make_contents(
    engine: Engine,
    names: Names,
    optimizers: Trained,
    small: Small,
    digests: list[dict[str, Any]],
    notes: dict[str, Any],
) -> Contents:
    """``digests``: of every rank's ``small``. ``notes``: further fields of the manifest."""
    builder = _Builder(engine, names)
    builder.add_small(small, digests)
    for group in sorted(engine.groups, key=lambda group: group.home.tier != "device"):
        builder.add_group(group, optimizers)
    shared = ("extra", "modules") if builder.rank else ()
    same = [name for name in shared if digests[0][f"tree/{name}"] == _digest_of_tree(small.trees[name])]
    trees = {name: tree for name, tree in small.trees.items() if name not in same}
    steps = [param["step"] for entry in small.optimizers.values() for param in entry.params.values()]
    manifest = Manifest(
        world_size=engine.everyone.size,
        step=max(steps, default=0),
        files={},
        tensors=(),
        optimizer=small.optimizers.get(""),
        named={name: entry for name, entry in small.optimizers.items() if name},
        ranks=(trees,),
        plan=str(engine.plan),
        **notes,
    )
    return builder.finish(manifest)


_State = tuple[str, str | None]
"""An optimizer's name and a state of it; of the master itself there is neither."""


class _Builder:
    """Numbers pieces in the order of the file."""

    def __init__(self, engine: Engine, names: Names) -> None:
        self.rank = engine.everyone.rank
        self._engine = engine
        self._names = names
        self._of = names.of
        self._tensors: dict[tuple[str, str, str, str | None], Tensor] = {}
        self._parts: list[tuple[Tensor, Part]] = []
        self._small: list[torch.Tensor] = []
        self._lots: list[Lot] = []

    def add_small(self, small: Small, digests: list[dict[str, Any]]) -> None:
        mine = small.digests()
        for kind, name, value in small.tensors:
            key = f"{kind}/{name}"
            own = kind == "value" and name.startswith("rng")
            first = next(rank for rank, theirs in enumerate(digests) if key in theirs)
            if self.rank != first and not own and digests[first][key] == mine[key]:
                continue
            whose = self.rank if self.rank != first or own else None
            tensor = Tensor(kind, name, value.dtype, tuple(value.shape), (), rank=whose)
            self._tensors[kind, name, "", None] = tensor
            if value.numel():
                self._parts.append((tensor, Part.whole(tensor.shape)))
                self._small.append(value)

    def add_group(self, group: Group, optimizers: Trained) -> None:
        """The master of a group, and the optimizers' states of it."""
        lot = master_lot(group)
        frozen = {slot for slot, param in enumerate(group.params) if not param.requires_grad}
        self._add_lot(group, lot, ("", None), dict.fromkeys(range(len(group.params)), True), frozen)
        for name, optimizer in optimizers.items():
            self._add_states(group, name, optimizer)

    def _add_states(self, group: Group, name: str, optimizer: ShardedOptimizer) -> None:
        mine = {id(param) for param in optimizer._params()}
        stored = {slot: stored_states(optimizer, param) for slot, param in enumerate(group.params) if id(param) in mine}
        if all(names is not None and not names for names in stored.values()):
            return
        for state in seen_states(optimizer.rule, optimizer.own, group):
            wanted = {slot: names is None or state.spec.name in names for slot, names in stored.items()}
            if any(wanted.values()):
                lot = Lot(state.store.label, (Held.of(state.store),), coded=state if state.coded else None)
                self._add_lot(group, lot, (name, state.spec.name), wanted, set())

    def _add_lot(self, group: Group, lot: Lot, state: _State, wanted: dict[int, bool], frozen: set[int]) -> None:
        for slot, param in enumerate(group.params):
            if wanted.get(slot):
                self._tensor(group, slot, param, lot.dtype, state, slot in frozen)
        for segment in _to_write(group, self._engine.ranks.rank) if writes(group.params[0], self._engine.others) else ():
            if wanted.get(segment.slot):
                param, at = group.params[segment.slot], segment.shard_start
                tensor = self._tensor(group, segment.slot, param, lot.dtype, state, False)
                for part in parts_of(param, segment.start, segment.numel):
                    lot.spans.append(Span(len(self._parts), at, part.numel))
                    self._parts.append((tensor, part))
                    at += part.numel
        if lot.spans:
            self._lots.append(lot)

    def _tensor(self, group: Group, slot: int, param: nn.Parameter, dtype: torch.dtype, whose: _State, frozen: bool) -> Tensor:
        name = self._of[id(param)]
        optimizer, state = whose
        kind: Kind = "param" if state is None else "state"
        key = (kind, name, optimizer, state)
        if key not in self._tensors:
            shape = tuple(param.shape)
            more = (
                {"optimizer": optimizer}
                if state
                else {"given": group.dtypes[slot], "aliases": self._names.aliases.get(name, ())}
            )
            self._tensors[key] = Tensor(kind, name, dtype, shape, (), state=state, frozen=frozen, **more)
        return self._tensors[key]

    def finish(self, manifest: Manifest) -> Contents:
        file = file_name(self.rank)
        header = header_of([(tensor, Piece(part, file, 0)) for tensor, part in self._parts])
        pieces, offset = [], len(header)
        for tensor, part in self._parts:
            piece = Piece(part, file, offset)
            pieces.append((tensor, piece))
            offset += tensor.nbytes(piece)
        manifest = replace(manifest, tensors=tuple(self._tensors.values()))
        return Contents(manifest, file, pieces, self._small, self._lots, header)


def _to_write(group: Group, rank: int) -> list[Segment]:
    """This rank's 1/N of a group; ``shard_start`` counts from the start of the owned run."""
    shift = rank * group.layout.shard_numel - group.own_start
    return [replace(segment, shard_start=segment.shard_start + shift) for segment in group.layout.segments(rank)]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().to("cpu", copy=True).contiguous()
    return copied.clone() if copied.is_conj() or copied.is_neg() else copied


def _digest_of_tree(tree: Any) -> str:
    """Short, however much there is in ``extra``: every rank gets those of all."""
    return hashlib.blake2b(repr(tree).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _digest(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], int]:
    flat = tensor.reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), crc(flat.view(torch.uint8).numpy()) if flat.numel() else 0
