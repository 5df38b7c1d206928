"""Tiny models of ``transformers``, each with something about its files that loading could get wrong."""

import torch


def tiny(kind: str):
    """A model with random weights, built as the library builds it."""
    import transformers as hf

    torch.manual_seed(7)
    if kind == "llama":
        config = hf.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=96, tie_word_embeddings=True, max_position_embeddings=64,
        )  # fmt: skip
        return hf.LlamaForCausalLM(config)
    if kind in ("qwen3_moe", "mixtral"):
        common = {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "num_experts_per_tok": 2,
        }  # fmt: skip
        if kind == "mixtral":
            return hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=4, **common))
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=24, head_dim=8, **common))
    if kind == "t5":
        config = hf.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0,
        )  # fmt: skip
        return hf.T5ForConditionalGeneration(config)
    if kind == "nomic_bert":
        config = hf.NomicBertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=96
        )  # fmt: skip
        return hf.NomicBertModel(config)
    if kind == "ernie_vl":
        text = {
            "hidden_size": 512, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 96, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 16],
            "moe_num_shared_experts": 1,
        }  # fmt: skip
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48}
        config = hf.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
        return hf.Ernie4_5_VLMoeForConditionalGeneration(config)
    assert kind == "vit"
    config = hf.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, num_labels=5
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


KINDS = ("llama", "qwen3_moe", "mixtral", "t5", "vit")
ODD_KINDS = ("nomic_bert", "ernie_vl")
"""Projections packed into one in files; routers transposed, and experts of two kinds mixed in one list."""


def loss_of(model, kind: str) -> torch.Tensor:
    """One batch, the same each time."""
    generator = torch.Generator().manual_seed(3)
    if kind == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator)
        return model(pixel_values=pixels, labels=torch.tensor([1, 4])).loss
    tokens = torch.randint(1, 96, (2, 12), generator=generator)
    if kind == "t5":
        return model(input_ids=tokens, labels=tokens.flip(1)).loss
    return model(input_ids=tokens, labels=tokens).loss
