"""Whether a manifest can be true: everything about a checkpoint that can be judged without reading a tensor."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from unwall.checkpoint.boxes import uncovered
from unwall.checkpoint.checksums import checked_runs, crc
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.manifest import KINDS, MANIFEST, FileEntry, Manifest, OptimizerEntry, Piece, Tensor, loads

_COUNTS = 1 << 62


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a complete checkpoint, checked in itself (``check_manifest``) but not against the files."""
    path = Path(directory, MANIFEST)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{directory} has no complete checkpoint in it: there is no {MANIFEST}") from None
    manifest = loads(data, str(path))
    check_manifest(manifest, str(path))
    return manifest


def check_manifest(manifest: Manifest, where: str) -> None:
    """CheckpointError where the manifest contradicts itself, naming file and tensor."""
    _check_kinds(manifest, where)
    for name, entry in manifest.files.items():
        if not _is_plain(name):
            raise CheckpointError(f"{where} names the file {name!r}, which is not a file beside it: the manifest is damaged")
        if not all(_is_count(value) for value in (entry.nbytes, entry.header_bytes)) or entry.header_bytes > entry.nbytes:
            raise CheckpointError(f"{where} gives {name} a size that cannot be: {entry}")
    seen = set()
    for tensor in manifest.tensors:
        key = (tensor.kind, tensor.name, tensor.optimizer, tensor.state, tensor.rank)
        if key in seen or tensor.kind not in KINDS or not all(_is_count(size) for size in tensor.shape):
            raise CheckpointError(f"{where}: the entry of {tensor.label} is damaged, or there are two of it")
        seen.add(key)
        for piece in tensor.pieces:
            _check_piece(manifest, tensor, piece, where)
        try:
            missing = uncovered(tensor.shape, [piece.part for piece in tensor.pieces])
        except ValueError as error:
            raise CheckpointError(f"{where}: {tensor.label}: {error}") from error
        if missing:
            raise CheckpointError(f"{where}: {tensor.label} is not complete, {missing} of its elements are in no file")
    if len(manifest.ranks) != manifest.world_size:
        ranks = f"{len(manifest.ranks)} of {manifest.world_size} ranks"
        raise CheckpointError(f"{where} has what {ranks} kept for themselves: the manifest is damaged")


def _check_kinds(manifest: Manifest, where: str) -> None:
    """CheckpointError where a value is of another kind than was ever written."""
    counts = {"world_size": manifest.world_size, "step": manifest.step}
    mappings = {"model": manifest.model, "versions": manifest.versions}
    texts = {"plan": manifest.plan, "saved_at": manifest.saved_at}
    wrong = [name for name, value in counts.items() if not _is_count(value) or (name == "world_size" and not value)]
    wrong += [name for name, value in mappings.items() if not isinstance(value, Mapping)]
    wrong += [name for name, value in texts.items() if not isinstance(value, str)]
    wrong += [f"the name {tensor.name!r}" for tensor in manifest.tensors if not _is_named(tensor)]
    wrong += [f"the entry of optimizer {name!r}" for name, entry in manifest.optimizers.items() if not _is_entry(entry)]
    if wrong:
        raise CheckpointError(f"{where}: {wrong[0]} is not of the kind that unwall writes: the manifest is damaged")


def _is_named(tensor: Tensor) -> bool:
    texts = (tensor.kind, tensor.name, tensor.optimizer, tensor.state or "", *tensor.aliases)
    return all(isinstance(text, str) for text in texts) and (tensor.rank is None or _is_count(tensor.rank))


def _is_entry(entry: OptimizerEntry) -> bool:
    """As far as it can be told without the optimizer. Options and the like are trees (tree.py)."""
    names = [name for listed, _ in entry.groups for name in listed]
    if not all(isinstance(text, str) for text in (entry.kind, *names)) or not isinstance(entry.scaler, Mapping):
        return False
    if not isinstance(entry.params, Mapping) or not all(isinstance(options, Mapping) for _, options in entry.groups):
        return False
    return all(isinstance(saved, Mapping) and _is_saved(saved) for saved in entry.params.values())


def _is_saved(saved: Mapping[str, object]) -> bool:
    """Of one parameter: ``OptimizerEntry.params``."""
    stored = saved.get("stored", [])
    listed = isinstance(stored, list) and all(isinstance(name, str) for name in stored)
    return _is_count(saved.get("step")) and listed and ("stored" in saved) == ("inner" in saved)


def check_files(directory: Path, manifest: Manifest) -> None:
    """Whether every file is there, of the right size, with the header that was written."""
    for name, entry in manifest.files.items():
        path = directory / name
        held = next(
            (tensor.label for tensor in manifest.tensors for piece in tensor.pieces if piece.file == name), "no tensors"
        )
        try:
            descriptor = open_file(path)
        except OSError as error:
            raise CheckpointError(f"{path}, which holds {held} and others, cannot be read: {error.strerror}") from error
        try:
            _check_header(path, entry, descriptor, held)
        finally:
            os.close(descriptor)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """A regular file, for reading. Nothing is opened through a symbolic link: it could lead out of the checkpoint."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(22, "it is not a regular file", str(path))
    return descriptor


def _check_header(path: Path, entry: FileEntry, descriptor: int, held: str) -> None:
    size = os.fstat(descriptor).st_size
    if size != entry.nbytes:
        raise CheckpointError(
            f"{path}, which holds {held} and others, has {size} bytes, expected {entry.nbytes}: it is damaged"
        )
    if crc(os.pread(descriptor, entry.header_bytes, 0)) != entry.header_crc:
        raise CheckpointError(f"the header of {path}, which holds {held} and others, is damaged: its checksum is wrong")


def _check_piece(manifest: Manifest, tensor: Tensor, piece: Piece, where: str) -> None:
    part, entry = piece.part, manifest.files[piece.file]
    counts = (*part.box.offsets, *part.box.sizes, part.start, part.numel, piece.offset)
    if not all(_is_count(value) for value in counts) or not part.box.fits(tensor.shape) or part.end > part.box.numel:
        raise CheckpointError(f"{where}: {part} is no part of {tensor.label}, which has the shape {tensor.shape}")
    nbytes = tensor.nbytes(piece)
    if piece.offset < entry.header_bytes or piece.offset + nbytes > entry.nbytes:
        raise CheckpointError(
            f"{where}: {tensor.label} is said to be at byte {piece.offset} of {piece.file}, which has {entry.nbytes} bytes"
        )
    if len(piece.crcs) != len(list(checked_runs(piece.offset, nbytes))):
        raise CheckpointError(
            f"{where}: {tensor.label} in {piece.file} has {len(piece.crcs)} checksums: the manifest is damaged"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _COUNTS


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name
