"""A transformers model whose loss never holds all logits.

[Note: a head that waits]
When labels are given, the head hands its input on instead of multiplying it, and the model's loss function takes the head's
matrix with it. That is only right where the model does nothing to the logits on their way: what arrives at the loss must be the
very tensor that left the head, otherwise it is an error. Without labels (generation, evaluation of logits) nothing changes.
"""

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from unwall.nn.linear_cross_entropy import linear_cross_entropy


def use_linear_cross_entropy(model: nn.Module, chunk_tokens: int | None = None) -> nn.Module:
    """Switches a transformers causal language model to ``linear_cross_entropy``, in place; before or after ``unwall.shard``.

    With labels the output's ``logits`` is None from then on: they are never computed. Without labels the model is as it was.
    """
    find_head: Any = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    if not isinstance(head, nn.Linear) or not hasattr(model, "loss_function"):
        raise ValueError(
            f"{type(model).__name__} is no transformers language model with a linear head: call "
            "unwall.nn.linear_cross_entropy(hidden, head.weight, labels) in its forward instead"
        )
    kind = getattr(model, "loss_type", None)
    if kind not in ("ForCausalLM", None):
        raise ValueError(f"{type(model).__name__} has the loss {kind}: only the one of causal language models can be switched")
    waiting = _Waiting(model, head, chunk_tokens)
    head.forward = waiting.head_forward  # type: ignore[method-assign]
    model.loss_function = waiting.loss  # type: ignore[assignment]
    model.register_forward_pre_hook(waiting.before, with_kwargs=True)
    model.register_forward_hook(waiting.after, with_kwargs=True, always_call=True)
    return model


class _Waiting:
    """One call of the model. See [Note: a head that waits]."""

    def __init__(self, model: nn.Module, head: nn.Linear, chunk_tokens: int | None) -> None:
        self._name = type(model).__name__
        self._head = head
        self._plain_head = head.forward
        self._chunk_tokens = chunk_tokens
        self._with_labels = False
        self._passed: torch.Tensor | None = None

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if labels is None and len(args) > 1:
            names = list(inspect.signature(model.forward).parameters)
            labels = dict(zip(names, args, strict=False)).get("labels")
        self._with_labels = labels is not None
        self._passed = None

    def after(self, _: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Any) -> Any:
        with_labels, self._with_labels, self._passed = self._with_labels, False, None
        if not with_labels or output is None:
            return None
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        output.logits = None
        return output

    def head_forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._with_labels:
            return self._plain_head(input)
        self._passed = input.view(input.shape)  # a tensor of its own, to be known again
        return self._passed

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,  # noqa: ARG002 (of transformers' signature)
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """As transformers' loss of a causal language model: each token predicts the next one."""
        if self._passed is None:
            raise RuntimeError(
                f"{self._name} computes a loss, but was given no labels that can be seen from outside: pass them by name, "
                "model(input_ids=..., labels=...)"
            )
        if logits is not self._passed:
            raise RuntimeError(
                f"{self._name} changes its logits before the loss (a scale, a cap): linear_cross_entropy cannot take their "
                "place; use the model without the switch"
            )
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if logits.shape[:-1] != shift_labels.shape:
            raise ValueError(f"logits_to_keep leaves {tuple(logits.shape[:-1])} tokens, but there are labels for all: drop it")
        loss = linear_cross_entropy(
            logits, self._head.weight, shift_labels, self._head.bias, ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum", label_smoothing=options.get("label_smoothing", 0.0),
            chunk_tokens=self._chunk_tokens,
        )  # fmt: skip
        return loss if num_items_in_batch is None else loss / num_items_in_batch
