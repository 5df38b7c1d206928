"""``device_bytes`` is the card from the first step on, with ``activations="auto"``: bytes counted as an allocator would."""

import gc

import pytest
import torch
from counted_card import put_in
from transformers import LlamaConfig, LlamaForCausalLM

import unwall
from unwall.runtime import auto, census, saved_on_host
from unwall.runtime.beside import Beside
from unwall.schedule.activations import Link

TOKENS = torch.arange(128).view(2, 64)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Blocks take the same time. A try of the link would take 32 MiB, too, which is nothing on a card and everything here."""
    monkeypatch.setattr(census.Watch, "seconds", lambda _: 1.0)
    monkeypatch.setattr(auto, "link_of", lambda _engine, flight: Link(1e9, 1 << 30, flight, whole_blocks=False))


def peaks_of(card, vocabulary, switched, steps, *, layers=8, tokens=TOKENS, **options):
    """The most that was allocated in each step, and the model."""
    gc.collect()  # the model before this one
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=vocabulary)).to(torch.bfloat16).train()
    if switched:
        unwall.nn.use_linear_cross_entropy(model)
    unwall.shard(model, unwall.Plan(params="host", optimizer="host", **options))
    engine = unwall.api.engine(model)
    card.ours = lambda: engine.device.ledger.live_bytes
    optimizer = unwall.AdamW(model.parameters())
    found = []
    for _ in range(steps):
        card.most_bytes = 0
        with card:
            model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        found.append(card.most_bytes)
    return found, model


@pytest.mark.parametrize(("vocabulary", "switched"), [(256, False), (2000, False), (2000, True)])
def test_no_step_takes_more_than_the_budget(vocabulary, switched, monkeypatch):
    """Somewhat more than a step takes that recomputes everything: some blocks can be kept, not all. With blocks that are most
    of the card, and with a head that is."""
    card = put_in(monkeypatch)
    (least,), _ = peaks_of(card, vocabulary, switched, 1, activations="recompute", device_bytes="1GiB")
    budget = int(least * (1.5 if vocabulary < 1000 else 1.2))
    card.peak_bytes = 0
    found, model = peaks_of(card, vocabulary, switched, 4, device_bytes=budget)
    assert max(found) <= budget, [each / budget for each in found]
    used = unwall.api.engine(model).activations.used
    assert set(used) != {"keep"}
    assert "keep" in used


def test_where_inputs_do_not_fit_they_go_to_the_host_in_the_first_step(monkeypatch):
    """Less than a step takes that recomputes everything and keeps the inputs of its blocks, which are most of it here."""
    monkeypatch.setattr(saved_on_host, "MIN_BYTES", 1)
    long = {"layers": 24, "tokens": torch.arange(1024).view(2, 512) % 256}
    card = put_in(monkeypatch)
    (recomputed,), _ = peaks_of(card, 256, False, 1, activations="recompute", device_bytes="1GiB", **long)
    budget = int(0.8 * recomputed)
    card.peak_bytes = 0
    found, model = peaks_of(card, 256, False, 1, device_bytes=budget, **long)
    assert max(found) <= budget, [each / budget for each in found]
    assert "host" in unwall.api.engine(model).activations.used


def test_where_there_is_room_the_first_step_keeps_everything(monkeypatch):
    card = put_in(monkeypatch)
    _, model = peaks_of(card, 256, False, 1, device_bytes="1GiB")
    assert set(unwall.api.engine(model).activations.used) == {"keep"}


def test_what_lies_beside_the_blocks():
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 500))
    beside = Beside(model, [model[1]])
    weights = 1000 * 8 * 8
    assert beside.nbytes([torch.empty(2, 5, 8)]) == 1000 * 10 * 16 + weights  # for each token
    assert beside.nbytes([torch.empty(2, 16, 5, 5)]) == 1000 * 2 * 16 + weights  # for each image
    assert beside.nbytes([]) == 0
