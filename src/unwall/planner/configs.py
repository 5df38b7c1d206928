"""A model as its Hugging Face ``config.json`` describes it: the families whose sizes are known here."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unwall.json_files import read_json
from unwall.planner.description import Description, DescriptionError, Part, block_of, feed_forward, vocab_parts


class UnknownFamilyError(DescriptionError):
    """A model type whose sizes are not known here."""

    def __init__(self, kind: object, config: Mapping[str, Any]) -> None:
        known = ", ".join(sorted(_FAMILIES))
        super().__init__(f"model_type {kind!r} is not known, only {known}; describe it by a module or a shape")
        self.config = config


def from_config(config: Mapping[str, Any] | str | Path) -> Description:
    """From a ``config.json``: its content, its path, or the directory it is in. Attention is taken to be fused."""
    if not isinstance(config, Mapping):
        config = _read(Path(config))
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise UnknownFamilyError(kind, config)
    return Description(name=str(config.get("_name_or_path") or kind), parts=_FAMILIES[kind](config))


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    found = read_json(path, DescriptionError)
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
    apart = [rows * width * hidden for rows in (heads, keys, keys, heads)]
    biases = (heads + 2 * keys) * width if kind == "qwen2" or config.get("attention_bias") else 0
    biases += hidden if config.get("attention_bias") else 0
    biases += 2 * inner + hidden if config.get("mlp_bias") else 0
    norms = 2 * hidden + (2 * width if kind.startswith("qwen3") else 0)
    layers = _size(config, "num_hidden_layers")
    block = block_of("layers", layers, attention, hidden, biases + norms, apart)
    block = feed_forward(block, hidden, inner, gated=True, experts=experts, chosen=chosen)
    block = replace(block, pair_flops=2 * heads * width)  # scores and mixing, 4 per pair, and half the pairs: it is causal
    return block, *vocab_parts(_size(config, "vocab_size"), hidden, bool(config.get("tie_word_embeddings")), norm=hidden)


def _gpt2(config: Mapping[str, Any]) -> tuple[Part, ...]:
    hidden = _size(config, "n_embd", "hidden_size")
    inner = _size(config, "n_inner", default=4 * hidden)
    attention = [(3 * hidden, hidden), (hidden, hidden)]
    block = block_of("h", _size(config, "n_layer", "num_hidden_layers"), attention, hidden, extra=8 * hidden)
    block = replace(feed_forward(block, hidden, inner, bias=True), pair_flops=2 * hidden)
    places = _size(config, "n_positions", "max_position_embeddings", default=1024) * hidden
    tied = bool(config.get("tie_word_embeddings", True))
    return block, *vocab_parts(_size(config, "vocab_size"), hidden, tied, norm=2 * hidden, lookups=places)


def _t5(config: Mapping[str, Any]) -> tuple[Part, ...]:
    hidden, heads, inner = (_size(config, key) for key in ("d_model", "num_heads", "d_ff"))
    width, layers = heads * _size(config, "d_kv"), _size(config, "num_layers")
    decoders = _size(config, "num_decoder_layers", default=layers)
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    attention = [(3 * width, hidden), (hidden, width)]
    apart = [width * hidden] * 4
    encoder = block_of("encoder.block", layers, attention, hidden, 2 * hidden, apart)
    decoder = block_of("decoder.block", decoders, attention + attention, hidden, 3 * hidden, apart + apart)
    encoder = replace(feed_forward(encoder, hidden, inner, gated=gated), pair_flops=4 * width)
    pairs = 6 * width  # half of the decoder's own pairs (it is causal), all of those with the encoder
    decoder = replace(feed_forward(decoder, hidden, inner, gated=gated), pair_flops=pairs)
    offsets = 2 * heads * _size(config, "relative_attention_num_buckets", default=32)
    tied = bool(config.get("tie_word_embeddings", True))
    return encoder, decoder, *vocab_parts(_size(config, "vocab_size"), hidden, tied, norm=2 * hidden, lookups=offsets)


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], tuple[Part, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), _llama),
    "gpt2": _gpt2,
    "t5": _t5,
}
