"""A checkpoint's weights as files that ``transformers`` loads, without an accelerator, ranks or the model in memory."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from unwall.checkpoint.boxes import Box, Part
from unwall.checkpoint.directory import find
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.inventory import inventory
from unwall.checkpoint.manifest import Manifest, Tensor
from unwall.checkpoint.match import Match
from unwall.checkpoint.model_card import empty_model, write_card
from unwall.checkpoint.naming import to_files
from unwall.checkpoint.out_files import OutFiles, plan_files
from unwall.checkpoint.patchwork import Patchwork
from unwall.checkpoint.progress import Advance, progress
from unwall.checkpoint.reader import CheckpointFiles
from unwall.checkpoint.validation import read_manifest
from unwall.checkpoint.weights_out import MAX_SHARD_SIZE, main_dtype, specs_of, turned, write_range
from unwall.checkpoint.window import STRETCH_ELEMENTS
from unwall.tiers.sizes import parse_bytes


def export_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> list[Path]:
    """What ``export_weights`` would have written when the checkpoint was saved. Gives the files.

    Checksums are verified before anything is written."""
    limit = parse_bytes(max_shard_size, "max_shard_size")
    directory = find(Path(path))
    manifest = read_manifest(directory)
    with CheckpointFiles(directory, manifest) as files:
        tensors = _weights(manifest)
        made = _made(manifest, tensors, directory)
        given = {name: tensor.given or tensor.dtype for name, tensor in tensors.items()}
        specs = specs_of(made, given, dtype)
        files.verify(dict.fromkeys(tensors.values()))
        written = OutFiles(Path(out), specs, plan_files(specs, limit), shared_by_machines=False)
        try:
            written.create()
            with (
                torch.no_grad(),
                progress(
                    "exporting weights", sum(tensor.nbytes(piece) for tensor in _once(tensors) for piece in tensor.pieces)
                ) as advance,
            ):
                _copy(files, tensors, turned(made), written, advance)
            written.sync()
            write_card(manifest.model, written.folder, main_dtype(specs))
            written.publish()
        except BaseException:
            written.discard()
            raise
    return [written.folder / file.name for file in written.files]


def _weights(manifest: Manifest) -> dict[str, Tensor]:
    """Parameters and buffers by each of their names, as rank 0 had them."""
    found: dict[str, Tensor] = {}
    for tensor in manifest.tensors:
        if tensor.kind in ("param", "buffer") and tensor.rank is None:
            found |= dict.fromkeys((tensor.name, *tensor.aliases), tensor)
    return found


def _made(manifest: Manifest, tensors: dict[str, Tensor], directory: Path) -> dict[str, Patchwork]:
    """The tensors of the files, made of those of the checkpoint."""
    model = empty_model(manifest.model)
    if model is None:
        return {tensor.name: Patchwork.whole(tensor.name, tensor.shape) for tensor in _once(tensors)}
    held = inventory(model)
    for name, entry in held.items():
        if name not in tensors or tensors[name].shape != tuple(entry.shape):
            there = "missing" if name not in tensors else f"of shape {list(tensors[name].shape)}"
            raise CheckpointError(
                f"{directory}: {name} is {there}, but {type(model).__name__} of its config has one of {list(entry.shape)}: the "
                "model was changed after it was built, so load the checkpoint and use unwall.export_weights"
            )
    made = to_files(model, held)
    more = [tensor for tensor in _once(tensors) if tensor.name not in held]
    return made | {tensor.name: Patchwork.whole(tensor.name, tensor.shape) for tensor in more}


def _once(tensors: dict[str, Tensor]) -> Iterable[Tensor]:
    return {id(tensor): tensor for tensor in tensors.values()}.values()


def _copy(
    files: CheckpointFiles, tensors: dict[str, Tensor], goals: dict[str, list[Match]], out: OutFiles, advance: Advance
) -> None:
    for name, matches in goals.items():
        tensor = tensors[name]
        numel = torch.Size(tensor.shape).numel()
        for low in range(0, numel, STRETCH_ELEMENTS):
            values = torch.empty(min(STRETCH_ELEMENTS, numel - low), dtype=tensor.dtype)
            files.read(tensor, Part(Box.whole(tensor.shape), low, values.numel()), values)
            write_range(out, matches, values, low)
            advance(values.nbytes)
