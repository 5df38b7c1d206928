"""A model as the planner sees it: parameters, FLOPs and activations of each part. No weights are needed.

[Note: what a matrix costs]
Everything is derived from the matrices. Each token that passes one costs 2 FLOPs an element forward, and leaves the input and
the output behind for backward: for a transformer's four matrices that is 16 * hidden numbers a token, as ZeRO-Infinity counts.
A lookup (an embedding) costs no FLOPs. Of experts, only those that a token is sent to count. Attention adds a term for each
pair of tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn

from unwall.planner.formulas import HALF_BYTES


class DescriptionError(ValueError):
    """A model that cannot be described: says what was got, what was expected, and what to write instead."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A block of the model, or what is left beside the blocks. Equal neighbours are one part with a count."""

    name: str
    numel: int
    """Parameters of one."""
    count: int = 1
    is_block: bool = True
    """A repeated block: what lies between two activation checkpoints."""
    active_numel: int
    """Elements of the matrices that each token passes."""
    largest_numel: int
    """The largest single parameter: what a device must hold whole unless it is tiled."""
    boundary_numel: int = 0
    """Elements a token that enter the part: what an activation checkpoint holds."""
    token_numel: int = 0
    """Elements a token that stay for backward."""
    pair_numel: int = 0
    """Elements for each pair of tokens of a sample that stay for backward: attention scores, unless attention is fused."""
    pair_flops: int = 0
    """FLOPs forward for each pair of tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model. ``batch`` is in samples, ``seq`` in tokens a sample; the answers are for whoever has that batch."""

    name: str
    parts: tuple[Part, ...]

    @property
    def params(self) -> int:
        """Parameters in all."""
        return sum(part.count * part.numel for part in self.parts)

    @property
    def active_params(self) -> int:
        """Elements of matrices that each token passes."""
        return sum(part.count * part.active_numel for part in self.parts)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return sum(part.count for part in self.parts if part.is_block)

    @property
    def largest_numel(self) -> int:
        """The largest single parameter."""
        return max(part.largest_numel for part in self.parts)

    @property
    def state_working_bytes(self) -> int:
        """The largest operator, value and gradient, in the compute dtype."""
        return 2 * HALF_BYTES * self.largest_numel

    def flops(self, batch: float, seq: float, recompute: bool = False) -> float:
        """One iteration: forward, backward (twice forward), and forward of the blocks once more when recomputed."""
        total = 0.0
        for part in self.parts:
            forward = batch * seq * (2 * part.active_numel + part.pair_flops * seq)
            total += part.count * forward * (4 if recompute and part.is_block else 3)
        return total

    def activation_bytes(self, batch: float, seq: float) -> float:
        """Everything that forward leaves for backward, nothing recomputed."""
        return sum(part.count * _part_activation_bytes(part, batch, seq) for part in self.parts)

    def checkpoint_bytes(self, batch: float, seq: float, every: int = 1) -> float:
        """The inputs of every ``every``-th block."""
        if every < 1:
            raise DescriptionError(f"every is the number of blocks between checkpoints, at least 1, got {every!r}")
        widths = [part.boundary_numel for part in self.parts if part.is_block for _ in range(part.count)]
        return HALF_BYTES * batch * seq * sum(widths[::every])

    def activation_working_bytes(self, batch: float, seq: float, every: int = 1) -> float:
        """What lies between two activation checkpoints, or beside the blocks, at most."""
        return max(min(every, part.count) * _part_activation_bytes(part, batch, seq) for part in self.parts)


def _part_activation_bytes(part: Part, batch: float, seq: float) -> float:
    return HALF_BYTES * batch * seq * (part.token_numel + part.pair_numel * seq)


_SHAPE = re.compile(r"\s*(\d+)\s*[xX]\s*(\d+)(?:\s*[xX]\s*(\d+))?\s*")


def from_shape(shape: str | tuple[int, int], heads: int | None = None, vocab: int = 0) -> Description:
    """A transformer as ZeRO-Infinity counts it: ``"80x10240"`` or ``"80x10240x128"`` is layers, hidden size, heads.

    The blocks are ``12 * layers * hidden**2`` parameters, no biases and norms; attention scores are kept and their FLOPs not
    counted. With ``vocab`` an embedding and a head of their own are added.
    """
    if isinstance(shape, str):
        match = _SHAPE.fullmatch(shape)
        if match is None:
            raise DescriptionError(f"cannot read the shape {shape!r}; write layers x hidden, such as 80x10240")
        layers, hidden = int(match[1]), int(match[2])
        heads = heads if match[3] is None else int(match[3])
    else:
        layers, hidden = shape
    heads = max(1, hidden // 128) if heads is None else heads
    for what, value in (("layers", layers), ("hidden size", hidden), ("heads", heads)):
        if value < 1:
            raise DescriptionError(f"shape {shape!r}: {what} must be at least 1, got {value}")
    if vocab < 0:
        raise DescriptionError(f"vocab must not be negative, got {vocab}")
    block = _block("blocks", layers, [(3 * hidden, hidden), (hidden, hidden)], hidden)
    block = replace(_feed_forward(block, hidden, 4 * hidden), pair_numel=2 * heads)
    rest = _vocab_parts(vocab, hidden, tied=False) if vocab else ()
    return Description(name=f"{layers}x{hidden}", parts=(block, *rest))


def from_module(module: nn.Module, name: str | None = None) -> Description:
    """Reads shapes only: build the model under ``torch.device("meta")`` and it takes no memory.

    Blocks are the children of the outermost ``ModuleList`` and ``Sequential`` containers. See [Note: what a matrix costs]; what
    shapes do not show is not counted: the pairs of attention, and that a convolution uses its weight at many places.
    """
    experts, chosen = _experts_of(module)
    found: list[tuple[str, bool, Part]] = []
    seen: set[int] = set()
    for owner, unit, is_block in _units(module):
        part = _module_part(owner, unit, is_block, chosen / experts, seen)
        if part is not None:
            found.append((owner.rpartition(".")[0] if is_block else owner, is_block, part))
    if not found:
        raise DescriptionError(f"{type(module).__name__} has no parameters")
    parts = []
    for (listed, is_block, _), run in groupby(found, key=lambda item: (item[0], item[1], replace(item[2], name=""))):
        same = [part for _, _, part in run]
        parts.append(replace(same[0], name=(listed or "blocks") if is_block else same[0].name, count=len(same)))
    return Description(name=name or type(module).__name__, parts=tuple(parts))


def _units(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, Iterable[tuple[str, nn.Module]], bool]]:
    """(name, its modules, is it a block), in registration order."""
    if module._parameters:
        yield prefix, [("", module)], False
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(module, nn.ModuleList | nn.Sequential):
            yield path, child.named_modules(), True
        else:
            yield from _units(child, path)


def _module_part(
    name: str, modules: Iterable[tuple[str, nn.Module]], is_block: bool, share: float, seen: set[int]
) -> Part | None:
    numel, active, token, largest = 0, 0.0, 0.0, 0
    widths: Counter[int] = Counter()
    for path, module in modules:
        for param in module.parameters(recurse=False):
            if id(param) not in seen:  # a tied parameter exists once, but is passed wherever it appears
                seen.add(id(param))
                numel += param.numel()
                largest = max(largest, param.numel())
            if param.dim() < 2 or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            stacked = param.dim() == 3 and not isinstance(module, nn.modules.conv._ConvNd)  # one matrix for each expert
            rows, columns = param.shape[1:] if stacked else param.shape[:2]
            used = share if "experts" in path.split(".") else 1.0
            active += param.numel() * used
            token += (rows + columns) * (param.shape[0] if stacked else 1) * used
            widths.update((rows, columns))
    if not numel and not active:
        return None
    width = min(widths, key=lambda size: (-widths[size], size)) if widths else 0
    return Part(
        name=name, numel=numel, is_block=is_block, active_numel=round(active), largest_numel=largest,
        boundary_numel=width if is_block else 0, token_numel=round(token),
    )  # fmt: skip


def _experts_of(module: nn.Module) -> tuple[int, int]:
    config = getattr(module, "config", None)
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return (count, chosen) if isinstance(count, int) and isinstance(chosen, int) else (1, 1)


def from_config(config: Mapping[str, Any] | str | Path) -> Description:
    """From a ``config.json``: its content, its path, or the directory it is in. Attention is taken to be fused."""
    if not isinstance(config, Mapping):
        config = _read(Path(config))
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise DescriptionError(f"model_type {kind!r} is not known, only {known}; describe it by a module or a shape")
    return Description(name=str(config.get("_name_or_path") or kind), parts=_FAMILIES[kind](config))


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise DescriptionError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DescriptionError(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DescriptionError(f"{path}: expected an object with model_type and sizes, got {type(found).__name__}")
    return found


def _size(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DescriptionError(f"{config['model_type']} config: {key} must be a whole number above 0, got {value!r}")
            return value
    if default is None:
        raise DescriptionError(f"{config['model_type']} config: {' or '.join(keys)} is missing, so the model has no size")
    return default


def _llama(config: Mapping[str, Any]) -> tuple[Part, ...]:
    kind, hidden = config["model_type"], _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    keys = _size(config, "num_key_value_heads", default=heads)
    width = _size(config, "head_dim", default=hidden // heads)
    if width < 1 or heads % keys:
        raise DescriptionError(f"{kind} config: {heads} heads, {keys} for keys, do not divide the hidden size {hidden}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise DescriptionError(f"{kind} config: some layers have no experts, which is not known here; describe it by a module")
    experts = _size(config, "num_local_experts", "num_experts", default=1)
    chosen = _size(config, "num_experts_per_tok", default=1)
    inner = _size(config, "moe_intermediate_size", "intermediate_size") if experts > 1 else _size(config, "intermediate_size")
    attention = [(heads * width + 2 * keys * width, hidden), (hidden, heads * width)]
    biases = (heads + 2 * keys) * width if kind == "qwen2" or config.get("attention_bias") else 0
    biases += hidden if config.get("attention_bias") else 0
    biases += 2 * inner + hidden if config.get("mlp_bias") else 0
    norms = 2 * hidden + (2 * width if kind.startswith("qwen3") else 0)
    layers = _size(config, "num_hidden_layers")
    block = _block("layers", layers, attention, hidden, biases + norms, largest=heads * width * hidden)
    block = _feed_forward(block, hidden, inner, gated=True, experts=experts, chosen=chosen)
    block = replace(block, pair_flops=2 * heads * width)  # scores and mixing, 4 a pair, and half the pairs: it is causal
    return block, *_vocab_parts(_size(config, "vocab_size"), hidden, bool(config.get("tie_word_embeddings")), norm=hidden)


def _gpt2(config: Mapping[str, Any]) -> tuple[Part, ...]:
    hidden = _size(config, "n_embd", "hidden_size")
    inner = _size(config, "n_inner", default=4 * hidden)
    attention = [(3 * hidden, hidden), (hidden, hidden)]
    block = _block("h", _size(config, "n_layer", "num_hidden_layers"), attention, hidden, extra=8 * hidden)
    block = replace(_feed_forward(block, hidden, inner, bias=True), pair_flops=2 * hidden)
    places = _size(config, "n_positions", "max_position_embeddings", default=1024) * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    return block, *_vocab_parts(_size(config, "vocab_size"), hidden, tied, norm=2 * hidden, lookups=places)


def _t5(config: Mapping[str, Any]) -> tuple[Part, ...]:
    hidden, heads, inner = (_size(config, key) for key in ("d_model", "num_heads", "d_ff"))
    width, layers = heads * _size(config, "d_kv"), _size(config, "num_layers")
    decoders = _size(config, "num_decoder_layers", default=layers)
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    attention = [(3 * width, hidden), (hidden, width)]
    encoder = _block("encoder.block", layers, attention, hidden, 2 * hidden, largest=width * hidden)
    decoder = _block("decoder.block", decoders, attention + attention, hidden, 3 * hidden, largest=width * hidden)
    encoder = replace(_feed_forward(encoder, hidden, inner, gated=gated), pair_flops=4 * width)
    pairs = 6 * width  # of the decoder's own, half; of those with the encoder, all
    decoder = replace(_feed_forward(decoder, hidden, inner, gated=gated), pair_flops=pairs)
    offsets = 2 * heads * _size(config, "relative_attention_num_buckets", default=32)
    tied = bool(config.get("tie_word_embeddings", True))
    return encoder, decoder, *_vocab_parts(_size(config, "vocab_size"), hidden, tied, norm=2 * hidden, lookups=offsets)


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], tuple[Part, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), _llama),
    "gpt2": _gpt2,
    "t5": _t5,
}


def _block(name: str, count: int, matrices: list[tuple[int, int]], hidden: int, extra: int = 0, largest: int = 0) -> Part:
    """From matrices as (rows, columns), and ``extra`` elements of norms and biases. ``largest``: where they are kept apart."""
    sizes = [rows * columns for rows, columns in matrices]
    return Part(
        name=name, count=count, numel=sum(sizes) + extra, active_numel=sum(sizes), largest_numel=largest or max(sizes),
        boundary_numel=hidden, token_numel=sum(map(sum, matrices)),
    )  # fmt: skip


def _feed_forward(
    block: Part, hidden: int, inner: int, *, gated: bool = False, bias: bool = False, experts: int = 1, chosen: int = 1
) -> Part:
    """Adds the two matrices, or three when gated, or the experts (stacked in one parameter) and their router."""
    matrices = 3 if gated else 2
    router = hidden * experts if experts > 1 else 0
    each = matrices * hidden * inner
    kept = 2 * hidden + 2 * (matrices - 1) * inner  # gated: both projections, the activation, the product
    return replace(
        block,
        numel=block.numel + router + experts * each + (hidden + inner if bias else 0),
        active_numel=block.active_numel + router + chosen * each,
        largest_numel=max(block.largest_numel, hidden * inner * (1 if experts == 1 else experts * (matrices - 1))),
        token_numel=block.token_numel + experts * (experts > 1) + chosen * kept,
    )


def _vocab_parts(vocab: int, hidden: int, tied: bool, norm: int = 0, lookups: int = 0) -> tuple[Part, Part]:
    """The embedding with other lookups, and the head with the last norm. A tied head has no parameters of its own."""
    table = vocab * hidden
    embedding = Part(name="embedding", numel=table + lookups, is_block=False, active_numel=0, largest_numel=table)
    head = Part(
        name="head", numel=norm + (0 if tied else table), is_block=False, active_numel=table, largest_numel=table,
        token_numel=hidden + vocab,
    )  # fmt: skip
    return embedding, head
