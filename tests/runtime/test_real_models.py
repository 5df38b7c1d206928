"""Real architectures in small: ten steps are those of plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from reference import Case, check_parity
from torch import nn

VOCABULARY, LENGTH = 48, 8
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def mixtral():
    config = transformers.MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    return transformers.T5ForConditionalGeneration(config)


def mamba():
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config)


def vit():
    config = transformers.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        num_labels=5,
    )
    config.qkv_bias = False  # a key's bias has no gradient but rounding, so there would be nothing to compare
    return transformers.ViTForImageClassification(config)


def text():
    ids = torch.randint(2, VOCABULARY, (2, LENGTH))
    return {"input_ids": ids, "labels": ids}


def images():
    return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(5, (4,))}


def own_loss(model, batch):
    return model(**batch).loss


class ResidualBlock(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, pixel_values):
        return self.head(self.blocks(self.stem(pixel_values)).mean((2, 3)))


def classify(model, batch):
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


class MessagePassing(nn.Module):
    """Messages along edges, summed at their targets, and a recurrent update of the nodes."""

    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.update = nn.GRUCell(width, width)

    def forward(self, nodes, edges):
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], dim=1))
        return self.update(torch.zeros_like(nodes).index_add(0, target, messages), nodes)


class GraphNet(nn.Module):
    """The same message passing three times, as is usual."""

    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(7, 16)
        self.passing = MessagePassing(16)
        self.head = nn.Linear(16, 3)

    def forward(self, kinds, edges):
        nodes = self.kinds(kinds)
        for _ in range(3):
            nodes = self.passing(nodes, edges)
        return self.head(nodes).sum(0)


def graph():
    nodes = int(torch.randint(6, 12, ()))  # of another size at each step and rank
    return torch.randint(7, (nodes,)), torch.randint(nodes, (2, 3 * nodes)), torch.randint(3, ())


def graph_loss(model, batch):
    kinds, edges, target = batch
    return F.cross_entropy(model(kinds, edges), target)


CASES = {build.__name__: Case(build=build, batch=text, loss=own_loss) for build in (gpt2, llama, mixtral, t5, mamba)}
CASES["vit"] = Case(build=vit, batch=images, loss=own_loss)
CASES["resnet"] = Case(build=ResNet, batch=images, loss=classify)
CASES["gnn"] = Case(build=GraphNet, batch=graph, loss=graph_loss)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("world", "tight"), [(1, False), (2, True)], ids=["one-rank", "two-ranks"])
def test_ten_steps(ranks, name, world, tight):
    check_parity(ranks(world), CASES[name], steps=10, tight=tight)


def generate_between(case, model, optimizer, batch, step, rank):
    """The text that the model writes at this step counts as part of its loss."""
    model.eval()
    written = model.generate(batch["input_ids"][:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.train()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach() + written.double().mean()


@pytest.mark.parametrize("build", [gpt2, t5])
@pytest.mark.parametrize(("world", "tight"), [(1, False), (2, True)], ids=["one-rank", "two-ranks"])
def test_generate_between_training_steps(ranks, build, world, tight):
    case = Case(build=build, batch=text, loss=own_loss, iterate=generate_between)
    check_parity(ranks(world), case, steps=3, tight=tight)


def checkpointed_llama():
    model = llama()
    model.gradient_checkpointing_enable()
    return model


def test_gradient_checkpointing_of_transformers(ranks):
    check_parity(ranks(2), Case(build=checkpointed_llama, batch=text, loss=own_loss), tight=True)
