"""Small models with repeated blocks, one of each kind: what makes one gives the model, and a function that gives a loss."""

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm2d(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.relu(self.conv(self.norm(x))))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.stages = nn.Sequential(nn.Sequential(Block(8), Block(8)), nn.MaxPool2d(2), nn.Sequential(Block(8), Block(8)))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
}
TOKENS = torch.arange(24).view(2, 12) % 40


def decoder():
    model = LlamaForCausalLM(LlamaConfig(**TINY, attention_dropout=0.1))
    return model.train(), lambda: model(TOKENS, labels=TOKENS).loss


def encoder_decoder():
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 40}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.1, decoder_start_token_id=0))
    return model.train(), lambda: model(TOKENS, labels=TOKENS).loss


def experts():
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**TINY, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    )
    return model.train(), lambda: model(TOKENS, labels=TOKENS).loss


def convolutions():
    model = Convolutions()
    images = torch.linspace(-1, 1, 2 * 3 * 12 * 12).view(2, 3, 12, 12)
    return model, lambda: nn.functional.cross_entropy(model(images), torch.tensor([1, 3]))


MAKERS = [decoder, encoder_decoder, experts, convolutions]
