"""What is in a checkpoint, for people to read."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unwall.checkpoint.directory import find
from unwall.checkpoint.manifest import KINDS, Manifest, Tensor
from unwall.checkpoint.progress import progress
from unwall.checkpoint.reader import CheckpointFiles
from unwall.checkpoint.validation import read_manifest
from unwall.tiers.sizes import format_bytes

WORDS = {"param": "parameters", "state": "optimizer states", "buffer": "buffers", "value": "values of extra and generators"}
"""What the kinds of tensors are called."""


@dataclass(frozen=True)
class Found:
    """A checkpoint, and whether its checksums were verified."""

    path: Path
    manifest: Manifest
    verified: bool

    def rows(self) -> list[tuple[str, int, int]]:
        """For each kind of tensors: what it is called, how many there are, and their bytes."""
        found = []
        for kind in KINDS:
            tensors = [tensor for tensor in self.manifest.tensors if tensor.kind == kind]
            nbytes = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
            found.append((WORDS[kind], len(tensors), nbytes))
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        manifest, optimizers = self.manifest, self.manifest.optimizers
        return {
            "path": str(self.path),
            "step": manifest.step,
            "saved_at": manifest.saved_at,
            "versions": dict(manifest.versions),
            "ranks": manifest.world_size,
            "plan": manifest.plan,
            "model": manifest.model.get("class"),
            "optimizer": ", ".join(f"{name}: {entry.kind}" if name else entry.kind for name, entry in optimizers.items())
            or None,
            "tensors": {name: {"count": count, "bytes": nbytes} for name, count, nbytes in self.rows()},
            "files": {name: entry.nbytes for name, entry in manifest.files.items()},
            "bytes": manifest.nbytes,
            "verified": self.verified,
        }


def inspect_checkpoint(path: str | os.PathLike[str], verify: bool = False) -> Found:
    """Reads the manifest and looks at the files. ``verify``: CheckpointError where a byte is not what was written."""
    directory = find(Path(path))
    manifest = read_manifest(directory)
    with CheckpointFiles(directory, manifest) as files:
        if verify:
            with progress("verifying", manifest.nbytes) as advance:
                for name, entry in manifest.files.items():
                    files.verify(_in_file(manifest, name))
                    advance(entry.nbytes)
    return Found(directory, manifest, verify)


def _in_file(manifest: Manifest, name: str) -> list[Tensor]:
    """The tensors of a manifest with what is in one file alone."""
    kept = [(tensor, tuple(piece for piece in tensor.pieces if piece.file == name)) for tensor in manifest.tensors]
    return [replace(tensor, pieces=pieces) for tensor, pieces in kept if pieces]


def tables(found: Found) -> Any:
    """For a terminal."""
    from rich.console import Group
    from rich.table import Table

    about = found.to_dict()
    head = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    rows = {
        "checkpoint": about["path"],
        "step": about["step"],
        "model": about["model"] or "",
        "optimizer": about["optimizer"] or "none",
        "written": f"{about['saved_at']} on {about['ranks']} rank{'s' if about['ranks'] != 1 else ''} with {versions}",
        "plan": about["plan"],
        "checksums": "all right" if found.verified else "not verified (--verify reads everything)",
    }
    for name, value in rows.items():
        head.add_row(name, str(value))
    tensors = Table("tensors", "count", "bytes", box=None, padding=(0, 2, 0, 0))
    for name, count, nbytes in found.rows():
        tensors.add_row(name, str(count), format_bytes(nbytes))
    files = Table("file", "bytes", box=None, padding=(0, 2, 0, 0))
    for name, nbytes in about["files"].items():
        files.add_row(name, format_bytes(nbytes))
    files.add_row("together", format_bytes(about["bytes"]))
    return Group(head, "", tensors, "", files)
