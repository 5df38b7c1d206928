"""From a path that a user gives to the files that hold weights. What another program wrote is recognised by its files."""

import json
import os
from pathlib import Path

from unwall.checkpoint.directory import complete
from unwall.checkpoint.foreign import foreign
from unwall.checkpoint.manifest import MANIFEST
from unwall.checkpoint.weight_files import Entry, WeightFiles, WeightsError, read_entries

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin")


def open_weights(path: str | os.PathLike[str]) -> WeightFiles:
    """A file, an index, or a directory with either. FileNotFoundError or WeightsError say what is there instead."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"there are no weights at {path}: give a file, or a directory with model.safetensors. A model of the Hugging Face "
            "hub is fetched first, with huggingface_hub.snapshot_download(name), which returns its directory"
        )
    if path.is_dir():
        path = _main_file(path)
    return WeightFiles(_indexed(path) if path.name.endswith(".json") else read_entries(path))


def _main_file(folder: Path) -> Path:
    """An index before a single file, safetensors before pickles, the usual names before one that is alone of its kind."""
    for name in (INDEXES[0], SINGLES[0]):
        if (folder / name).is_file():
            return folder / name
    _refuse_others(folder)
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
    for name in (INDEXES[1], SINGLES[1]):
        if (folder / name).is_file():
            return folder / name
    there = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise FileNotFoundError(f"{folder} has neither {SINGLES[0]} nor {INDEXES[0]}; there is: {there}")


def _indexed(index: Path) -> list[Entry]:
    """The tensors that an index names, each from the file that it names."""
    try:
        places = json.loads(index.read_text())["weight_map"]
        named = {str(name): str(file) for name, file in places.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise WeightsError(f"{index} is no index: a JSON table with a 'weight_map' from tensors to files is expected") from None
    entries: list[Entry] = []
    for file in dict.fromkeys(named.values()):
        wanted = [name for name, place in named.items() if place == file]
        if Path(file).name != file or file in ("", ".", ".."):
            raise WeightsError(f"{index} puts {wanted[0]!r} into {file!r}: a file beside the index is expected")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"{index} puts {wanted[0]!r} into {file}, which is not in {index.parent}")
        there = {entry.name: entry for entry in read_entries(index.parent / file)}
        missing = [name for name in wanted if name not in there]
        if missing:
            raise WeightsError(f"{index} puts {missing[0]!r} into {file}, but that file has no such tensor")
        entries += [there[name] for name in wanted]
    return entries


def _refuse_others(folder: Path) -> None:
    """One sentence for a directory that another program (or ``unwall.save``) wrote, with the command that converts it."""
    if (folder / MANIFEST).is_file() or complete(folder):
        raise WeightsError(
            f"{folder} holds checkpoints of unwall.save: use unwall.load, or write the weights alone with "
            f"`unwall export {folder} OUT`"
        )
    sentence = foreign(folder)
    if sentence is not None:
        raise WeightsError(sentence)
