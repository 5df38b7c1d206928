"""What a directory of weights says about its model beside the weights: its class, config and generation config, as JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.inventory import plain
from unwall.checkpoint.naming import pretrained


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Enough to write ``config.json`` and ``generation_config.json`` later. Little for a model that has neither."""
    model = plain(model)
    found: dict[str, Any] = {"class": type(model).__name__}
    if not pretrained(model):
        return found
    library: Any = model
    found["config"] = json.loads(library.config.to_json_string())
    found["config"]["architectures"] = [type(model).__name__]
    if library.can_generate() and getattr(library, "generation_config", None) is not None:
        found["generation_config"] = json.loads(library.generation_config.to_json_string())
    return found


def write_card(card: Mapping[str, Any], folder: Path, dtype: torch.dtype | None) -> None:
    """The files that ``transformers`` looks for beside the weights. ``dtype``: what the weights are in."""
    if "config" in card:
        config = card["config"]
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            parts = {key: part | {"dtype": name} for key, part in config.items() if isinstance(part, dict) and "dtype" in part}
            config = config | parts | {"dtype": name}
        _write(folder / "config.json", config)
    if "generation_config" in card:
        _write(folder / "generation_config.json", card["generation_config"])


def empty_model(card: Mapping[str, Any]) -> nn.Module | None:
    """The model without memory, on meta. None where ``transformers`` does not know its class: then names are kept."""
    if "config" not in card:
        return None
    try:
        import transformers
    except ImportError:
        raise RuntimeError(
            f"the checkpoint holds a {card['class']}: install transformers, which says how its weights are named in files"
        ) from None
    kind = getattr(transformers, str(card.get("class")), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return None
    try:
        config = kind.config_class.from_dict(card["config"])  # type: ignore[union-attr]
        with torch.device("meta"):
            model: nn.Module = kind(config)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{card['class']} of transformers {transformers.__version__} cannot be built from the config of the checkpoint "
            f"({type(error).__name__}: {said}): use the version that the model was trained with"
        ) from error
    return model


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
