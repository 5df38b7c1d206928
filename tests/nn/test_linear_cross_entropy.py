"""The loss without the logits: values and gradients of the plain one, and what it holds."""

import pytest
import torch
from torch.nn import functional
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import unwall
from unwall.nn import linear_cross_entropy, use_linear_cross_entropy

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "ignore_index": 3},
]


def plain(x, weight, labels, bias=None, z_loss=0.0, reduction="mean", ignore_index=-100, **options):
    logits = functional.linear(x, weight, bias).float().flatten(0, -2)
    losses = functional.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=ignore_index, **options)
    counted = labels.flatten() != ignore_index
    losses = losses + z_loss * logits.logsumexp(-1).square() * counted
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def inputs(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 11, 16, dtype=dtype), torch.randn(23, 16, dtype=dtype)
    labels = torch.randint(0, 23, (3, 11))
    labels[0, :4] = -100
    labels[1, 2] = 3
    tensors = [x, weight, torch.randn(23, dtype=dtype)] if bias else [x, weight]
    return [tensor.requires_grad_() for tensor in tensors], labels


def gradients(function, tensors, labels, **options):
    x, weight, *bias = tensors
    loss = function(x, weight, labels, *bias, **options)
    return [loss.detach(), *torch.autograd.grad((loss * torch.linspace(0.5, 2, loss.numel()).view(loss.shape)).sum(), tensors)]


@pytest.mark.parametrize("chunk_tokens", [1, 8, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_plain_loss_and_its_gradients(options, chunk_tokens):
    tensors, labels = inputs(bias=chunk_tokens != 8)
    if "ignore_index" in options:
        labels = labels.clamp(min=0)
    want = gradients(plain, tensors, labels, **options)
    found = gradients(linear_cross_entropy, tensors, labels, chunk_tokens=chunk_tokens, **options)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_bf16_chunks_add_up_in_fp32():
    tensors, labels = inputs(torch.bfloat16)
    want = gradients(plain, [tensor.detach().float().requires_grad_() for tensor in tensors], labels)
    for one, other in zip(gradients(linear_cross_entropy, tensors, labels, chunk_tokens=2), want, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=1e-3)


def test_autocast_and_only_some_gradients():
    tensors, labels = inputs(bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(*tensors, labels)
        found = linear_cross_entropy(*tensors, labels, chunk_tokens=8)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    (grad,) = torch.autograd.grad(found, tensors[:1])
    assert grad.dtype is torch.float32
    torch.testing.assert_close(grad, torch.autograd.grad(want, tensors[:1])[0], rtol=1e-1, atol=1e-3)


def test_no_tensor_is_as_large_as_the_logits():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    x, weight = torch.randn(512, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    labels = torch.randint(0, 1000, (512,))
    with Largest() as largest:
        linear_cross_entropy(x, weight, labels, chunk_tokens=32).backward()
    assert largest.numel == 32 * 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 3)}, "got \\(2, 3\\) and"),
        ({"labels": torch.zeros(5, dtype=torch.long)}, "one label per token"),
        ({"labels": torch.zeros(4)}, "whole numbers, got torch.float32"),
        ({"bias": torch.zeros(3)}, "one entry per row"),
        ({"reduction": "max"}, "reduction is mean, sum or none"),
        ({"label_smoothing": 2.0}, "between 0 and 1"),
        ({"z_loss": -1.0}, "z_loss is 0 or more"),
        ({"chunk_tokens": 0}, "chunk_tokens is a whole number above 0"),
    ],
)
def test_bad_input(changes, message):
    given = {"x": torch.zeros(4, 8), "weight": torch.zeros(10, 8), "labels": torch.zeros(4, dtype=torch.long), **changes}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**given)


# -- a transformers model ---------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 61,
}  # fmt: skip


def llama(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changes))


def batch():
    tokens = torch.arange(40).view(2, 20) % 61
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("items", [None, 30])
def test_a_switched_model_trains_as_before(tied, items):
    one, other = llama(tie_word_embeddings=tied), use_linear_cross_entropy(llama(tie_word_embeddings=tied), chunk_tokens=16)
    losses = []
    for model in (one, other):
        loss = model(**batch(), **({} if items is None else {"num_items_in_batch": items})).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0])
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_without_labels_the_logits_are_there():
    one, other = llama(), use_linear_cross_entropy(llama())
    assert other(**batch()).logits is None
    assert other(**batch(), return_dict=False)[1] is None
    tokens = batch()["input_ids"]
    torch.testing.assert_close(other(tokens).logits, one(tokens).logits)
    assert torch.equal(other.generate(tokens[:1], max_new_tokens=4), one.generate(tokens[:1], max_new_tokens=4))


def test_labels_may_be_passed_by_position():
    one, other = llama(), use_linear_cross_entropy(llama())
    ids, labels = batch()["input_ids"], batch()["labels"]
    args = (ids, None, None, None, None, labels)
    torch.testing.assert_close(other(*args).loss, one(*args).loss)
    assert other(*args).logits is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_switched_model_on_a_tier(tier, tied):
    losses = []
    for switched in (False, True):
        model = llama(tie_word_embeddings=tied)
        plan = unwall.Plan(
            params=tier, optimizer=tier, compute_dtype=torch.float32, device_bytes=None if tier == "device" else "150KiB"
        )
        unwall.shard(use_linear_cross_entropy(model, 16) if switched else model, plan)
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(4):
            loss = model(**batch()).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


class Doubled(torch.Tensor):
    """A weight with a product of its own, as quantised ones have."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            x, weight, bias = args
            return functional.linear(x, 2 * weight.as_subclass(torch.Tensor), bias)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_weight_that_has_a_product_of_its_own():
    x, weight, labels = torch.randn(6, 8), torch.randn(11, 8), torch.arange(6)
    found = linear_cross_entropy(x, weight.as_subclass(Doubled), labels, chunk_tokens=4)
    assert found.item() == pytest.approx(plain(x, 2 * weight, labels).item(), rel=1e-5)


def test_models_that_cannot_be_switched():
    with pytest.raises(ValueError, match="is no transformers language model with a linear head"):
        use_linear_cross_entropy(torch.nn.Linear(2, 2))
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": 20}
    with pytest.raises(ValueError, match="has the loss"):
        use_linear_cross_entropy(T5ForConditionalGeneration(T5Config(**sizes)))
    capped = use_linear_cross_entropy(Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8)))
    with pytest.raises(RuntimeError, match="changes its logits before the loss"):
        capped(**batch())
