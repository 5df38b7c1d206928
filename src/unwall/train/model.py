"""The model of a run: from a directory of ``transformers``, or from a config with random weights. It never exists whole."""

import ast
import contextlib
import inspect
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unwall.api import engine, init, shard
from unwall.checkpoint.load_weights import load_weights
from unwall.checkpoint.pretrained import build_empty, initialize_missing
from unwall.checkpoint.weights_in import match_weights
from unwall.json_files import read_json
from unwall.nn.switch import use_linear_cross_entropy
from unwall.optim.adamw import AdamW
from unwall.plans import Plan
from unwall.runtime.engine import Engine
from unwall.terminal import say
from unwall.tiers.device import default_device
from unwall.train.errors import TrainError, missing
from unwall.train.lora import adapts_head, add_adapters
from unwall.train.options import Options
from unwall.train.start import Start, without_collector
from unwall.train.world import size_of_world

_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Fields of configs whose models change their logits behind the head."""

FAR = 64
"""Sequences so many times as long as what a model has positions for are a mistake."""


@dataclass
class Trained:
    """A sharded model with its optimizer."""

    model: nn.Module
    """What is called: with LoRA, the one of ``peft``."""
    base: nn.Module
    """What was sharded."""
    engine: Engine
    optimizer: AdamW
    takes_count: bool
    """Whether the model's loss can be told how many tokens to divide by."""

    def loss(self, tensors: dict[str, torch.Tensor], count: int) -> torch.Tensor:
        """The sum over this pass's answer tokens, divided by ``count``: those of the whole step."""
        if self.takes_count:
            found: torch.Tensor = self.model(**tensors, use_cache=False, num_items_in_batch=count).loss
            return found
        mine = int((tensors["labels"][:, 1:] != -100).sum())
        found = self.model(**tensors, use_cache=False).loss
        return found * (mine / count) if mine else found.nan_to_num() * 0


def read_config(options: Options) -> Any:
    """The config alone, as ``transformers`` reads it."""
    try:
        import transformers
    except ImportError:
        raise missing("transformers", "unwall train") from None
    path = Path(options.model) if options.from_config else Path(options.model, "config.json")
    if options.from_config and path.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth"):
        raise TrainError(f"--model {options.model}: is a file of weights; give the directory of the model, or a config file")
    if not isinstance(read_json(path, TrainError), dict):
        raise TrainError(f"--model {options.model}: its config is no JSON object; give one that save_pretrained wrote")
    try:
        config = transformers.AutoConfig.from_pretrained(options.model, local_files_only=True)
    except Exception as error:  # whatever transformers makes of a broken config
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrainError(f"--model {options.model}: transformers cannot read its config: {said}") from None
    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise TrainError(f"--model {options.model}: {config.model_type} is no causal language model of text alone")
    if config.model_type in _read_both_ways() and not getattr(config, "is_decoder", False):
        raise TrainError(
            f"--model {options.model}: {config.model_type} reads in both directions, so it would see what it is to predict; "
            "use a causal language model, or set is_decoder in its config"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise TrainError(f"--model {options.model}: holds quantised weights, which are not trained; use what they were made of")
    weights = [path for path in Path(options.model).glob("*") if path.suffix in (".safetensors", ".bin")]
    if not options.from_config and not weights:
        raise TrainError(
            f"--model {options.model}: has a config but no weights; to start from random ones give the file itself, "
            f"{Path(options.model) / 'config.json'}"
        )
    return config


def _read_both_ways() -> frozenset[str]:
    """Types of models that fill in masked words, and are causal only where their config says so."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def check_length(options: Options, config: Any, rank: int) -> None:
    """TrainError for sequences that a model has no positions for; a word where it computes positions beyond those it knows."""
    known = getattr(config, "max_position_embeddings", None)
    if not isinstance(known, int) or options.seq <= known:
        return
    said = f"--seq {options.seq}: longer than the {known} positions of {options.model}"
    if not (getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None) or getattr(config, "alibi", False)):
        raise TrainError(f"{said}, which are learned; use --seq {known} or less")
    if options.seq > FAR * known:
        raise TrainError(f"{said}, and far beyond them; use --seq {known}, or set max_position_embeddings in its config")
    if rank == 0:
        say(f"unwall: {said}: it was not made for the rest", error=True)


def empty_model(options: Options, config: Any) -> nn.Module:
    """On the meta device, with adapters where asked for: to plan with."""
    import transformers

    with torch.device("meta"):  # adapters, too: nobody needs their random numbers
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return add_adapters(model, options) if options.lora else model


def make_model(options: Options, config: Any, plan: Plan, start: Start, *, resumes: bool) -> Trained:
    """All ranks together. ``resumes``: a checkpoint follows, which holds everything; values are not read twice."""
    import transformers

    kind = transformers.AutoModelForCausalLM
    torch.manual_seed(options.seed)
    if options.from_config:
        with init(plan, default_device()):  # a minute for billions of parameters where no accelerator draws them
            base: Any = kind.from_config(config)
        _prepare(base, options, plan)
        start.lap("building")
        shard(base, plan)
        start.lap("shard")
    else:
        reads = options.lora or not resumes
        with without_collector():  # its file is imported
            base = build_empty(options.model, kind, None, {})
        if reads:  # files that do not match are refused before anything takes memory
            _check_weights(base, options)
        _prepare(base, options, plan)
        start.lap("building")
        shard(base, plan)
        start.lap("shard")
        if reads:
            keys = load_weights(base, options.model, strict=False)
            initialize_missing(base, options.model, keys.missing_keys, keys.unexpected_keys)
            start.lap("weights")
    owner = engine(base)
    model = add_adapters(base, options) if options.lora else base
    model.train()
    optimizer = _optimizer(model, options)
    start.lap("optimizer")
    takes = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(base.forward).parameters.values())
    return Trained(model, base, owner, optimizer, takes)


def _check_weights(base: nn.Module, options: Options) -> None:
    """TrainError for files of another model."""
    try:
        match_weights(base, options.model, strict=False).files.close()
    except RuntimeError as error:  # as ``load_state_dict`` says it: a line for each parameter
        _, *lines = [line.strip() for line in str(error).splitlines()] or [""]
        if not lines:
            raise
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise TrainError(f"--model {options.model}: its weights do not match its config: {lines[0]}{more}") from None


def _prepare(base: Any, options: Options, plan: Plan) -> None:
    """What must be so before the model is cut."""
    if options.lora:
        base.requires_grad_(False)
    config = base.config
    scaled = any(getattr(config, name, None) not in (None, 1.0) for name in _SCALES)
    if not scaled and not adapts_head(base, options) and not _changes_logits(base):
        with contextlib.suppress(ValueError):  # a head or a loss of another kind: its logits exist whole
            use_linear_cross_entropy(base)
    if getattr(config, "output_router_logits", False) and hasattr(base, "router_aux_loss_coef"):
        # Gradients of all passes and ranks are added up; the balance of the experts is a mean over them.
        base.router_aux_loss_coef = base.router_aux_loss_coef / (plan.passes * size_of_world()[1])


def _changes_logits(base: Any) -> bool:
    """Whether a model always does something to what its head gives, such as a cast: then the head cannot wait for the loss.
    What a model only does where its config says so is in ``_SCALES``."""
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(type(base).forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    assigned = [line for line in getattr(function, "body", ()) if isinstance(line, ast.Assign)]
    values = [line.value for line in assigned if any(isinstance(to, ast.Name) and to.id == "logits" for to in line.targets)]
    return len(values) > 1 or any(_is_method(value, ("float", "to", "contiguous")) for value in values)


def _is_method(value: ast.expr, names: tuple[str, ...]) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in names


def _optimizer(model: nn.Module, options: Options) -> AdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [[param for param in trained if param.dim() > 1], [param for param in trained if param.dim() <= 1]]
    optimizer = AdamW(
        [{"params": group} for group in groups if group],
        lr=options.rate,
        max_grad_norm=options.clip or None,
        skip_nonfinite=bool(options.clip) or options.on_nonfinite == "skip",
    )
    set_decay(optimizer, options)
    return optimizer


def set_decay(optimizer: AdamW, options: Options) -> None:
    """Of matrices, not of norms and biases. A checkpoint brings its own."""
    for group in optimizer.param_groups:
        group["weight_decay"] = options.weight_decay if group["params"][0].dim() > 1 else 0.0


def describe(model: nn.Module, config: Any) -> dict[str, Any]:
    """For run.json."""
    params = list(model.parameters())
    return {
        "name": json.loads(config.to_json_string()).get("model_type", type(model).__name__),
        "params": sum(param.numel() for param in params),
        "trainable": sum(param.numel() for param in params if param.requires_grad),
    }
