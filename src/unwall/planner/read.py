"""What a user calls a model: a config, a directory, ``module:function``, or a shape such as ``80x10240``."""

import importlib
import os
import re
import sys
from pathlib import Path

import torch
from torch import nn

from unwall.planner.configs import UnknownFamilyError, from_config
from unwall.planner.description import Description, DescriptionError, from_shape
from unwall.planner.outline import Outline, outline_of, skeleton

_SHAPE_LIKE = re.compile(r"[\d.\-+\s]*[xX*][\d.\-+xX*\s]*|[\d.\-+\s]+")
_PYTHON_LIKE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_LONGEST = 300


def read_model(model: "str | Path | Description | nn.Module | Outline", vocab: int = 0) -> Outline:
    """Any of them as an outline. DescriptionError says what is wrong.

    ``vocab`` goes with a shape.
    """
    if isinstance(model, Outline):
        return model
    if isinstance(model, nn.Module):
        return outline_of(model)
    if isinstance(model, Description):
        return skeleton(model)
    if isinstance(model, Path):
        return _from_file(model)
    if not isinstance(model, str):
        raise DescriptionError(
            f"a model is an nn.Module, a config.json or its directory, module:function, or a shape such as 80x10240, "
            f"got {type(model).__name__}"
        )
    if _SHAPE_LIKE.fullmatch(model) and model not in (".", "..") and not os.path.isfile(os.path.join(model, "config.json")):
        return skeleton(from_shape(model, vocab=vocab))
    if Path(model).exists():
        return _from_file(model)
    if _PYTHON_LIKE.fullmatch(model):
        return _call(model)
    raise DescriptionError(
        f"no model is called {model!r}: give a config.json or the directory it is in, module:function, "
        "or a shape such as 80x10240"
    )


def _from_file(path: str | Path) -> Outline:
    """A config whose sizes are known here, or any other that transformers can build."""
    try:
        return skeleton(from_config(path))
    except UnknownFamilyError as error:
        if not isinstance(error.config.get("model_type"), str):
            raise
        return outline_of(_build(error), str(error.config["model_type"]))


def _build(unknown: UnknownFamilyError) -> nn.Module:
    """The model of a config, by transformers, on the meta device."""
    try:
        import transformers
    except ImportError:
        raise DescriptionError(f"{unknown}; with transformers installed any of its configs can be planned for") from None
    fields = dict(unknown.config)
    try:
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        named = [getattr(transformers, str(name), None) for name in config.architectures or ()]
        found = next((kind for kind in named if kind is not None), None)
        with torch.device("meta"):
            built: nn.Module = found(config) if found is not None else transformers.AutoModel.from_config(config)
            return built
    except Exception as error:  # whatever transformers makes of a config
        raise DescriptionError(f"transformers cannot build this config: {type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an error says, in one line: transformers lists all models that it knows where it does not know one."""
    line = (str(error).strip().splitlines() or [""])[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST].rstrip()} ..."


def read_dtype(name: str | None) -> torch.dtype | None:
    """``bfloat16``, ``float16`` or ``float32``, or their short names."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    name = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(name or "", name)
    if name is not None and name not in known:
        raise DescriptionError(f"dtype is one of {', '.join(known)}, got {name!r}")
    return None if name is None else known[name]


def _call(path: str) -> Outline:
    """``module:function``, called on the meta device. The function gives a module."""
    name, _, attribute = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: a module in the current directory is found
    try:
        found: object = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise DescriptionError(f"{path}: {name} cannot be imported: {error}") from error
    except AttributeError as error:
        raise DescriptionError(f"{path}: {error}") from error
    if isinstance(found, nn.Module):
        return outline_of(found, path)
    if not callable(found):
        raise DescriptionError(f"{path}: expected a function that returns an nn.Module, got {type(found).__name__}")
    try:
        with torch.device("meta"):
            built = found()
    except Exception as error:  # the user's own code
        raise DescriptionError(f"{path}: failed on the meta device: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(built, nn.Module):
        raise DescriptionError(f"{path}: expected an nn.Module, got {type(built).__name__}")
    return outline_of(built, path)
