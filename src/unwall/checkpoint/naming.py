"""Names in files and names in a model: which tensors of the one make up which tensors of the other.

Plain models use the same names on both sides. For models of ``transformers`` its own rules are asked (conversion_mapping and
core_model_loading there): names are changed, experts are stacked into one parameter, projections are packed or taken apart,
and the prefix of the bare backbone comes or goes. The rules run on patchworks, so they say what to read and move nothing.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unwall.checkpoint.inventory import Held, aliases
from unwall.checkpoint.patchwork import Patchwork


@dataclass
class Named:
    """What goes where. ``made``: for each tensor that is written, of what it is made."""

    made: dict[str, Patchwork] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rules: list[Any] = field(default_factory=list)
    """The rules of ``transformers`` that were used, which its ``save_pretrained`` wants to know."""


def pretrained(model: nn.Module) -> bool:
    """Whether it is a model of ``transformers``, which is not imported to find out."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


# -- from files into a model ----------------------------------------------------------------------------------------------


def from_files(model: nn.Module, held: Mapping[str, Held], shapes: Mapping[str, torch.Size]) -> Named:
    """The model's tensors, made of those in the files (``shapes``, by name)."""
    if not pretrained(model):
        return _by_name(held, shapes)
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = str(model.base_model_prefix) or None
    found = Named()
    collected: dict[str, Any] = {}
    for name in sorted(shapes, key=loading.dot_natural_key):
        key, pattern = loading.rename_source_key(name, renamings, converters, prefix, dict(held))
        if key not in held and name in held:  # a rule for older files matched a name that is right as it is
            key, pattern = loading.rename_source_key(name, [], [], prefix, dict(held))
        if key not in held:
            found.unexpected.append(name if pattern is None else key)
            continue
        rule = loading.WeightRenaming(name, key) if pattern is None else deepcopy(by_pattern[pattern])
        rule = collected.setdefault(key, rule)
        rule.add_tensor(key, name, pattern or name, Patchwork.whole(name, shapes[name]))
    _convert(model, held, collected, found)
    found.rules = [rule for rule in rules if rule.was_used()]
    found.unexpected = _without_ignored(found.unexpected, _ignored_in_files(model))
    return found


def _by_name(held: Mapping[str, Held], shapes: Mapping[str, torch.Size]) -> Named:
    made = {name: Patchwork.whole(name, shape) for name, shape in shapes.items() if name in held}
    return Named(made, [name for name in shapes if name not in held])


def _convert(model: Any, held: Mapping[str, Held], collected: dict[str, Any], found: Named) -> None:
    """Lets every rule that collected something run."""
    for key, rule in collected.items():
        try:
            made = rule.convert(key, model=model, config=model.config)
        except (ValueError, RuntimeError, IndexError, NotImplementedError) as error:
            found.errors.append(f"what is there for {key} cannot be converted to it: {error}")
            continue
        for name, value in made.items():
            value = value[0] if isinstance(value, list) else value
            if name in held:
                found.made[name] = value
            else:
                found.unexpected.append(name)


def missing_names(model: nn.Module, held: Mapping[str, Held], made: Iterable[str]) -> list[str]:
    """Names that nothing was found for, also not under another name of the same tensor."""
    there = {id(held[name].tensor) for name in made}
    missing = [name for name, entry in held.items() if id(entry.tensor) not in there]
    return _without_ignored(missing, getattr(model, "_keys_to_ignore_on_load_missing", None) if pretrained(model) else None)


def _ignored_in_files(model: Any) -> set[str]:
    """What older files contain and newer models do not, as ``transformers`` knows it."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _without_ignored(names: list[str], patterns: Iterable[str] | None) -> list[str]:
    ignored = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in dict.fromkeys(names) if not any(pattern.search(name) for pattern in ignored)]


# -- from a model into files ----------------------------------------------------------------------------------------------


def to_files(model: nn.Module, held: Mapping[str, Held]) -> dict[str, Patchwork]:
    """The tensors of the files, made of the model's. Tied tensors come once, under the name that ``transformers`` keeps."""
    kept = {name: Patchwork.whole(name, held[name].shape) for name in saved_names(model, dict(held))}
    if not pretrained(model):
        return kept
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, Patchwork] = revert_weight_conversion(model, kept)  # type: ignore[arg-type]
    return made


def saved_names(model: nn.Module, held: dict[str, Held]) -> list[str]:
    """The names under which tensors are saved, one for each tensor."""
    hidden = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) if pretrained(model) else set()
    tied: list[str] = []
    if pretrained(model):
        from transformers.modeling_utils import _get_tied_weight_keys

        tied = list(_get_tied_weight_keys(model))
    dropped: set[str] = set()
    for names in aliases(held).values():
        copies = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in tied)]
        keep = next((name for name in names if name not in copies), copies[-1] if copies else names[0])
        dropped |= set(names) - {keep}
    return [name for name in held if name not in dropped and name not in hidden]
