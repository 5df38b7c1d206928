"""Sparse attention against dense attention with the same mask: outputs and gradients."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import unwall
from unwall import sparse
from unwall.sparse.patterns import mask_function

PATTERNS = {
    "window": sparse.window(40),
    "dilated": sparse.dilated(9, 5, "bidirectional"),
    "fixed": sparse.fixed(block=16, num_local_blocks=4),
    "by head": sparse.fixed(block=16, num_different_global_patterns=4, different_layout_per_head=True),
    "variable": sparse.variable(block=16, num_random_blocks=1, local_window_blocks=[2, 3], global_block_indices=[1]),
    "bigbird": sparse.bigbird(block=16),
    "longformer": sparse.longformer(block=16),
}


def inputs(tokens, heads=4, shared=2):
    torch.manual_seed(0)
    return [torch.randn(2, count, tokens, 16, requires_grad=True) for count in (heads, shared, shared)]


def dense(q, k, v, pattern, causal, key_mask=None, scale=None):
    mask = create_mask(mask_function(pattern, k.shape[2]), 1, q.shape[1], q.shape[2], k.shape[2], device="cpu")
    if causal:
        mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    if key_mask is not None:
        mask = mask & key_mask[:, None, None]
    blind = ~mask.any(-1, keepdim=True)
    found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask | blind, enable_gqa=True, scale=scale)
    return found.masked_fill(blind, 0)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("tokens", "causal"), [(500, True), (128, False)])
def test_as_dense_attention_with_the_same_mask(name, tokens, causal):
    tensors, pattern = inputs(tokens), PATTERNS[name]
    want, found = dense(*tensors, pattern, causal), sparse.attention(*tensors, pattern, causal=causal)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(want)
    for one, other in zip(
        torch.autograd.grad(found, tensors, upstream), torch.autograd.grad(want, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_padding_and_queries_that_see_nothing():
    tensors, pattern = inputs(200), sparse.window(10)
    key_mask = torch.ones(2, 200, dtype=torch.bool)
    key_mask[0, :30] = False
    want = dense(*tensors, pattern, True, key_mask, scale=0.3)
    found = sparse.attention(*tensors, pattern, causal=True, key_mask=key_mask, scale=0.3)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    assert (found[0, :, :30] == 0).all()
    for one in torch.autograd.grad(found.sum(), tensors):
        assert torch.isfinite(one).all()


def test_a_mask_function_of_ones_own():
    tensors = inputs(150)

    def even_heads_look_back(b, h, q, k):
        return torch.where(h % 2 == 0, q >= k, (q - k).abs() < 4)

    want = dense(*tensors, even_heads_look_back, False)
    torch.testing.assert_close(sparse.attention(*tensors, even_heads_look_back), want, rtol=1e-5, atol=1e-5)


def test_a_mask_function_that_differs_by_sample():
    """Packed documents, cut otherwise in each sample."""
    tensors = inputs(150)
    document = torch.stack([torch.arange(150) // 40, torch.arange(150) // 70])

    def same_document(b, h, q, k):
        return (document[b, q] == document[b, k]) & (q >= k)

    mask = create_mask(same_document, 2, 4, 150, 150, device="cpu")
    want = functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(sparse.attention(*tensors, same_document), want, rtol=1e-5, atol=1e-5)
    document[:] = 0  # the same function says something else now
    torch.testing.assert_close(
        sparse.attention(*tensors, same_document), dense(*tensors, EVERYTHING, True), rtol=1e-5, atol=1e-5
    )


def test_a_mask_function_that_gives_no_truths():
    with pytest.raises(TypeError, match=r"gives a bool tensor.*got torch\.int64"):
        sparse.attention(*inputs(20), lambda b, h, q, k: q - k)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16)), "cannot share 3 heads"),
        (((2, 4, 8, 16), (2, 4, 8, 8), (2, 4, 8, 8)), "k and v alike"),
        (((4, 8, 16), (4, 8, 16), (4, 8, 16)), r"\[batch, heads, tokens, width\]"),
    ],
)
def test_bad_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        sparse.attention(*[torch.zeros(shape) for shape in shapes], sparse.window(4))


# -- transformers -----------------------------------------------------------------------------------------------------

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=1)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, num_key_value_heads=2, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ),
    "bert": lambda: BertForMaskedLM(BertConfig(**TINY, hidden_dropout_prob=0, attention_probs_dropout_prob=0)),
}
EVERYTHING = sparse.window(10_000, "bidirectional")


def gradients(make, pattern=None, tokens=150):
    torch.manual_seed(0)
    model = make()
    if pattern is not None:
        sparse.use(model, pattern)
    ids = torch.arange(2 * tokens).view(2, tokens) * 7 % 64
    padding = torch.ones(2, tokens, dtype=torch.long)
    padding[1, 100:] = 0
    loss = model(ids, attention_mask=padding, labels=ids.masked_fill(padding == 0, -100)).loss
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_a_pattern_that_allows_everything_changes_nothing(name):
    """Causality and padding are still the model's own."""
    want, found = gradients(MODELS[name]), gradients(MODELS[name], EVERYTHING)
    torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-6)
    for key, grad in want[1].items():
        torch.testing.assert_close(found[1][key], grad, rtol=1e-3, atol=1e-6, msg=key)


def test_a_window_is_the_models_own_sliding_window():
    from transformers import MistralConfig, MistralForCausalLM

    def make(**options):
        return lambda: MistralForCausalLM(MistralConfig(**TINY, num_key_value_heads=1, **options))

    want, found = gradients(make(sliding_window=20)), gradients(make(sliding_window=None), sparse.window(20))
    torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-6)


def test_what_is_out_of_reach_does_not_count():
    torch.manual_seed(0)
    model = sparse.use(MODELS["llama"](), sparse.window(8)).eval()
    ids = torch.arange(100)[None] % 64
    other = ids.clone()
    other[0, 40] = 63
    with torch.no_grad():
        changed = (model(ids).logits != model(other).logits).any(-1)[0]
    assert changed[40]
    assert not changed[:40].any()
    assert not changed[40 + 2 * 7 + 1 :].any()  # two layers of seven tokens


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_sharded_model(activations):
    torch.manual_seed(0)
    losses = []
    for tier in ("device", "host"):
        torch.manual_seed(0)
        model = sparse.use(MODELS["llama"](), sparse.bigbird(block=16))
        small = {} if tier == "device" else {"device_bytes": "80KiB"}
        plan = unwall.Plan(params=tier, optimizer=tier, activations=activations, compute_dtype=torch.float32, **small)
        unwall.shard(model, plan)
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        ids = torch.arange(200).view(2, 100) % 64
        losses.append([])
        for _ in range(4):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_what_cannot_be_switched():
    with pytest.raises(ValueError, match="is no transformers model"):
        sparse.use(torch.nn.Linear(2, 2), sparse.window(4))
    with pytest.raises(TypeError, match="a pattern is made by"):
        sparse.use(MODELS["llama"](), "window")


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2))


def gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**TINY, num_key_value_heads=1, head_dim=16, attn_logit_softcapping=30.0))


def test_models_that_would_stay_dense_are_refused():
    """transformers only logs that their attention is not switched."""
    model = bloom()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="BloomForCausalLM, BloomModel would stay dense"):
        sparse.use(model, sparse.window(4))
    assert model.config._attn_implementation == before


def test_what_a_layer_asks_for_beside_its_mask_is_not_left_out():
    with pytest.raises(RuntimeError, match="softcap"):
        sparse.use(gemma2(), sparse.window(4))(torch.arange(8)[None])


def test_heads_that_differ_in_a_model():
    """Heads of a function of ones own, and a layout by head whose heads are not all here (tensor parallelism)."""
    torch.manual_seed(0)
    model, ids = MODELS["llama"]().eval(), torch.arange(40)[None]
    with torch.no_grad():
        want = sparse.use(model, sparse.window(4))(ids).logits
        found = sparse.use(model, lambda b, h, q, k: (q - k < 4) | (h == 1) & (q < 0))(ids).logits
        other = sparse.use(model, lambda b, h, q, k: (q - k < 4) | (h == 1))(ids).logits
        torch.testing.assert_close(found, want)
        assert not torch.allclose(other, want)
        model.config.num_attention_heads = 4
        with pytest.raises(RuntimeError, match="2 heads here, and the pattern differs by head over 4"):
            sparse.use(model, lambda b, h, q, k: (q - k < 4) | (h == 1))(ids)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["dynamic", "static"])
def test_generation_with_a_cache(cache):
    torch.manual_seed(0)
    pattern = sparse.fixed(block=4, num_local_blocks=3, attention="unidirectional")
    model = sparse.use(MODELS["llama"]().eval(), pattern)
    ids, padding = torch.arange(20).view(2, 10), torch.ones(2, 10, dtype=torch.long)
    padding[0, :3] = 0
    options = {"attention_mask": padding, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options, **cache), model.generate(ids, **options, use_cache=False))


def test_a_block_mask_is_that_of_torch(monkeypatch):
    """What an accelerator is given, made here a few rows at a time."""
    from torch.nn.attention.flex_attention import create_block_mask

    from unwall.sparse import block_mask

    for name, pattern in PATTERNS.items():
        function = mask_function(pattern, 500)
        heads = 4 if name == "by head" else 1
        want = create_block_mask(function, 1, heads, 500, 500, device="cpu")
        for pairs in (1, 1 << 26):
            monkeypatch.setattr(block_mask, "PAIRS", pairs)
            found = block_mask.block_mask_of(function, 1, heads, 500, 500, torch.device("cpu"))
            assert torch.equal(found.to_dense(), want.to_dense())
            assert torch.equal(found.full_kv_num_blocks, want.full_kv_num_blocks)
            assert found.seq_lengths == want.seq_lengths
