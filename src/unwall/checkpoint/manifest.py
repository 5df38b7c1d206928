"""The manifest of a checkpoint: what is in which file. Pure data, as JSON and back.

[Note: format]
A checkpoint is a directory with ``manifest.json`` and ``safetensors`` files, one for each rank that wrote. A tensor of the
manifest is a *whole* one: a parameter in full precision (its fp32 master), a state of a parameter, a buffer, a value of the
user's ``extra``. Its pieces say which of its elements lie where, in the words of boxes.py. So nothing here depends on ranks,
stages or tiers; the plan it was written with is noted for people to read. A checkpoint without its manifest does not exist:
the manifest is renamed into place when everything else is on the disk.

Nothing is ever unpickled: values are JSON (tree.py says how tuples and the like are written), tensors are raw bytes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from unwall.checkpoint.boxes import Box, Part
from unwall.checkpoint.checksums import crc
from unwall.checkpoint.dtypes import DTYPES, name_of
from unwall.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "unwall checkpoint"
VERSION = 2
"""Of what is read. What an older unwall could read is written as version 1."""

Kind = Literal["param", "state", "buffer", "value"]
KINDS = ("param", "state", "buffer", "value")


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor, and the bytes that hold them, in row-major order."""

    part: Part
    file: str
    offset: int
    """First byte, counted from the start of the file."""
    crcs: tuple[int, ...] = ()
    """See [Note: checked runs] in checksums.py."""


@dataclass(frozen=True)
class Tensor:
    """A whole tensor, and where its elements are."""

    kind: Kind
    name: str
    """Of the parameter (for its states, too), the buffer or the value."""
    dtype: torch.dtype
    """Of what is stored."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    state: str | None = None
    """Which state of the parameter."""
    optimizer: str = ""
    """Whose state, where there are several optimizers."""
    rank: int | None = None
    """Of whom it is, where ranks have different ones."""
    given: torch.dtype | None = None
    """A parameter's dtype before the model was sharded: what ``state_dict`` shows."""
    aliases: tuple[str, ...] = ()
    """A tied parameter's other names."""
    frozen: bool = False
    """A parameter that was not trained."""

    @property
    def label(self) -> str:
        """For messages."""
        whose = "" if self.rank is None else f" of rank {self.rank}"
        whose = f"{whose} of optimizer {self.optimizer!r}" if self.optimizer else whose
        return f"{self.state} of {self.name}{whose}" if self.state else f"{self.kind} {self.name}{whose}"

    def nbytes(self, piece: Piece) -> int:
        return piece.part.numel * self.dtype.itemsize

    def key(self, piece: Piece) -> str:
        """What the piece is called inside its file."""
        name = "/".join(part for part in (self.kind, self.name, self.optimizer or None, self.state) if part is not None)
        whole = piece.part == Part.whole(self.shape)
        box = "" if piece.part.box == Box.whole(self.shape) else f"@{','.join(map(str, piece.part.box.offsets))}"
        return name if whole else f"{name}{box}[{piece.part.start}:{piece.part.end}]"

    def piece_shape(self, piece: Piece) -> tuple[int, ...]:
        """What it is in its file: the tensor itself, or a run of elements."""
        return self.shape if piece.part == Part.whole(self.shape) else (piece.part.numel,)


@dataclass(frozen=True)
class FileEntry:
    """One file."""

    nbytes: int
    header_bytes: int
    """Everything before the tensors' bytes: the header and the eight bytes that say how long it is."""
    header_crc: int


@dataclass(frozen=True)
class OptimizerEntry:
    """What an optimizer knows beside tensors of its parameters."""

    kind: str
    """``AdamW``, or ``wrap:`` and the name of the class."""
    groups: tuple[tuple[tuple[str, ...], Any], ...]
    """Of each param group the names of its parameters and, as a tree (tree.py), its options."""
    params: Mapping[str, Any]
    """Of each parameter that was stepped, as a tree: ``step``, and for ``wrap`` ``inner`` and ``stored``."""
    scaler: Mapping[str, Any]
    """Of the loss scale."""


@dataclass(frozen=True)
class Manifest:
    """See [Note: format]."""

    world_size: int
    step: int
    """The largest number of steps that any parameter has seen."""
    files: Mapping[str, FileEntry]
    tensors: tuple[Tensor, ...]
    optimizer: OptimizerEntry | None = None
    """The only one."""
    named: Mapping[str, OptimizerEntry] = field(default_factory=dict)
    """Several, by name."""
    ranks: tuple[Any, ...] = ()
    """Of each rank, as trees: ``rng``; ``extra`` and ``modules`` where they are not those of rank 0."""
    plan: str = ""
    """Of whoever wrote it, for people to read."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Class, config and generation config of the model (model_card.py), for exports."""
    saved_at: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def of_kind(self, kind: Kind) -> Iterator[Tensor]:
        return (tensor for tensor in self.tensors if tensor.kind == kind)

    @property
    def optimizers(self) -> dict[str, OptimizerEntry]:
        """All of them. One alone has no name."""
        return dict(self.named) if self.optimizer is None else {"": self.optimizer}

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(entry.nbytes for entry in self.files.values())


# -- JSON -------------------------------------------------------------------------------------------------------------


def dumps(manifest: Manifest) -> bytes:
    """The file's content. Its first line is a checksum over the rest."""
    body = json.dumps(_to_json(manifest), separators=(",", ":"), allow_nan=False)
    return f'{{"crc32":"{crc(body.encode()):08x}","manifest":{body}}}\n'.encode()


def loads(data: bytes, where: str) -> Manifest:
    """The inverse. CheckpointError, naming ``where``, for anything else."""
    try:
        outer = json.loads(data)
        head = f'{{"crc32":"{outer["crc32"]}","manifest":'.encode()
        if not data.startswith(head) or f"{crc(data[len(head) : -2]):08x}" != outer["crc32"]:
            raise ValueError("its checksum is wrong")
        content = outer["manifest"]
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["version"] > VERSION:
            raise ValueError(f"it has version {content['version']}, this unwall reads up to {VERSION}: use a newer unwall")
        return _from_json(content)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{where} is not the manifest of an unwall checkpoint, or is damaged: {error}") from error


def merged(parts: list[Manifest]) -> Manifest:
    """What several ranks wrote as one: pieces of the same tensor come together. Everything else is the first one's."""
    found: dict[tuple[Any, ...], Tensor] = {}
    for part in parts:
        for tensor in part.tensors:
            key = (tensor.kind, tensor.name, tensor.optimizer, tensor.state, tensor.rank)
            known = found.get(key)
            found[key] = tensor if known is None else replace(known, pieces=known.pieces + tensor.pieces)
    files = {name: entry for part in parts for name, entry in part.files.items()}
    ranks = tuple(entry for part in parts for entry in part.ranks)
    optimizer = _merged_optimizer([part.optimizer for part in parts])
    named = {name: _merged_optimizer([part.named.get(name) for part in parts]) for name in parts[0].named}
    return replace(
        parts[0],
        step=max(part.step for part in parts),
        tensors=tuple(found.values()),
        files=files,
        optimizer=optimizer,
        named={name: entry for name, entry in named.items() if entry is not None},
        ranks=ranks,
    )


def _merged_optimizer(entries: list[OptimizerEntry | None]) -> OptimizerEntry | None:
    """The first one's options, with the parameters of all pipeline stages."""
    first, known = entries[0], [entry for entry in entries if entry is not None]
    if first is None or all(entry.params.keys() == first.params.keys() and entry.groups == first.groups for entry in known):
        return first
    names: list[dict[str, None]] = [{} for _ in first.groups]
    for entry in known:
        for listed, (group, _) in zip(names, entry.groups, strict=True):
            listed.update(dict.fromkeys(group))
    groups = tuple((tuple(listed), options) for listed, (_, options) in zip(names, first.groups, strict=True))
    return replace(first, groups=groups, params={name: it for entry in known for name, it in entry.params.items()})


def _to_json(manifest: Manifest) -> dict[str, Any]:
    names = list(manifest.files)
    several = {name: _optimizer_to_json(entry) for name, entry in manifest.named.items()}
    return {
        "format": FORMAT,
        "version": 2 if several else 1,
        "saved_at": manifest.saved_at,
        "versions": dict(manifest.versions),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "plan": manifest.plan,
        "model": dict(manifest.model),
        "files": [
            {"name": name, "nbytes": entry.nbytes, "header_bytes": entry.header_bytes, "header_crc": entry.header_crc}
            for name, entry in manifest.files.items()
        ],
        "optimizer": None if manifest.optimizer is None else _optimizer_to_json(manifest.optimizer),
        **({"optimizers": several} if several else {}),
        "ranks": list(manifest.ranks),
        "tensors": [_tensor_to_json(tensor, names) for tensor in manifest.tensors],
    }


def _optimizer_to_json(entry: OptimizerEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "groups": [{"params": list(params), "options": options} for params, options in entry.groups],
        "params": dict(entry.params),
        "scaler": dict(entry.scaler),
    }


def _optimizer_from_json(entry: Any) -> OptimizerEntry:
    groups = tuple((tuple(group["params"]), group["options"]) for group in entry["groups"])
    return OptimizerEntry(entry["kind"], groups, entry["params"], entry["scaler"])


def _tensor_to_json(tensor: Tensor, files: list[str]) -> dict[str, Any]:
    whole = Box.whole(tensor.shape)
    found: dict[str, Any] = {
        "kind": tensor.kind,
        "name": tensor.name,
        "state": tensor.state,
        "optimizer": tensor.optimizer or None,
        "rank": tensor.rank,
        "dtype": name_of(tensor.dtype, tensor.label),
        "given": None if tensor.given is None else name_of(tensor.given, tensor.label),
        "shape": list(tensor.shape),
        "aliases": list(tensor.aliases),
        "frozen": tensor.frozen or None,
        "pieces": [
            {
                **({} if piece.part.box == whole else {"box": [list(piece.part.box.offsets), list(piece.part.box.sizes)]}),
                "run": [piece.part.start, piece.part.numel],
                "at": [files.index(piece.file), piece.offset],
                "crcs": list(piece.crcs),
            }
            for piece in tensor.pieces
        ],
    }
    return {name: value for name, value in found.items() if value is not None and value != []}


def _from_json(content: Any) -> Manifest:
    files = {
        entry["name"]: FileEntry(entry["nbytes"], entry["header_bytes"], entry["header_crc"]) for entry in content["files"]
    }
    optimizer = content["optimizer"]
    return Manifest(
        world_size=content["world_size"],
        step=content["step"],
        files=files,
        tensors=tuple(_tensor_from_json(entry, list(files)) for entry in content["tensors"]),
        optimizer=None if optimizer is None else _optimizer_from_json(optimizer),
        named={name: _optimizer_from_json(entry) for name, entry in content.get("optimizers", {}).items()},
        ranks=tuple(content["ranks"]),
        plan=content["plan"],
        model=content.get("model", {}),
        saved_at=content["saved_at"],
        versions=content["versions"],
    )


def _tensor_from_json(entry: Any, files: list[str]) -> Tensor:
    shape = tuple(entry.get("shape", ()))
    pieces = []
    for piece in entry.get("pieces", ()):
        offsets, sizes = piece.get("box", ((0,) * len(shape), shape))
        part = Part(Box(tuple(offsets), tuple(sizes)), *piece["run"])
        file, offset = piece["at"]
        if not 0 <= file < len(files):
            raise CheckpointError(f"{entry['kind']} {entry['name']} is in file {file}, but there are {len(files)} files")
        pieces.append(Piece(part, files[file], offset, tuple(piece.get("crcs", ()))))
    given = entry.get("given")
    return Tensor(
        kind=entry["kind"],
        name=entry["name"],
        dtype=DTYPES[entry["dtype"]],
        shape=shape,
        pieces=tuple(pieces),
        state=entry.get("state"),
        optimizer=entry.get("optimizer", ""),
        rank=entry.get("rank"),
        given=None if given is None else DTYPES[given],
        aliases=tuple(entry.get("aliases", ())),
        frozen=entry.get("frozen", False),
    )
