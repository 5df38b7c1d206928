"""``Plan(activations="auto")``: the values of keeping everything, inside a budget that covers activations."""

import warnings

import pytest
import torch
from models_with_blocks import MAKERS, convolutions, decoder, encoder_decoder
from ranks import RankPool
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.runtime import auto, saved_on_host
from unwall.schedule.activations import CHOICES, Link, everywhere
from unwall.schedule.observed import Observed


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """Also what is as small as in these models, over a link of which nobody knows how fast it is."""
    monkeypatch.setattr(saved_on_host, "MIN_BYTES", 1)
    monkeypatch.setattr(auto, "link_of", lambda _engine, flight: Link(1e9, 1 << 30, flight))


def sharded(model, **options):
    plan = unwall.Plan(compute_dtype=torch.float32, **{"params": "host", "optimizer": "host", **options})
    return unwall.shard(model, plan)


def decides(model):
    return unwall.api.engine(model).activations


def trained(make, steps=4, **options):
    """Losses and parameters after some steps."""
    torch.manual_seed(0)
    model, loss_of = make()
    sharded(model, **options)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict(), model


@pytest.fixture(scope="module")
def kept():
    return {make: trained(make, activations="keep") for make in MAKERS}


def same(found, expected, exact=True):
    (losses, values, _), (wanted, state, _) = found, expected
    # With checkpoints plain PyTorch adds up the gradient of an encoder's output in another order.
    assert losses == pytest.approx(wanted, abs=0 if exact else 1e-5, rel=0)
    for name, value in state.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=0 if exact else 1e-5)


@pytest.mark.parametrize("make", MAKERS)
def test_with_room_everything_is_kept_and_the_bits_are_those_of_keep(make, kept):
    found = trained(make, device_bytes="1GiB")
    same(found, kept[make])
    assert set(decides(found[2]).used) == {"keep"}


@pytest.mark.parametrize("make", MAKERS)
def test_a_small_budget(make, kept):
    """Large enough for the states and for some of the activations."""
    _, _, model = trained(make, device_bytes="1GiB")
    found = decides(model)
    activations = sum(block.kept_bytes for block in found.blocks)
    engine = unwall.api.engine(model)
    again = trained(make, device_bytes=engine.least_device_bytes + activations * 2 // 3)
    same(again, kept[make], exact=make is not encoder_decoder)
    used = decides(again[2]).used
    counted = unwall.stats(again[2]).activations
    assert 0 < counted.kept_bytes < activations
    assert counted.recomputed_bytes + counted.moved_bytes > 0
    assert "kept on the device" in str(unwall.stats(again[2]))
    assert "keep" in used
    assert set(used) != {"keep"}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_for_every_other_block(make, choice, kept, monkeypatch):
    def alternate(self, ratio, room_bytes, link):
        return tuple(choice if at % 2 else other for at, other in enumerate(everywhere("keep", self.blocks)))

    monkeypatch.setattr(Observed, "best", alternate)
    found = trained(make, device_bytes="1GiB")
    same(found, kept[make], exact=make is not encoder_decoder or choice in ("keep", "move"))
    assert decides(found[2]).used[1] == choice
    if choice in ("move", "host"):
        assert unwall.stats(found[2]).links["device>host"].moved_bytes > 0


def test_without_a_card_and_without_a_budget_everything_is_kept():
    model = sharded(decoder()[0])
    assert decides(model) is None


def test_a_longer_batch_is_decided_for_at_once_and_a_shorter_one_too():
    model, _ = decoder()
    tokens = torch.arange(128).view(2, 64) % 40
    sharded(model, params="device", optimizer="device", device_bytes="4MiB")
    found = decides(model)
    for _ in range(3):
        model(tokens[:, :8], labels=tokens[:, :8]).loss.backward()
    assert set(found.used) == {"keep"}
    small = sum(block.kept_bytes for block in found.blocks)
    engine = unwall.api.engine(model)
    found._room._card._card_bytes = engine.least_device_bytes + 3 * small
    model(tokens, labels=tokens).loss.backward()
    assert "recompute" in found.used
    model(tokens[:, :8], labels=tokens[:, :8]).loss.backward()
    model(tokens[:, :8], labels=tokens[:, :8]).loss.backward()
    assert set(found.used) == {"keep"}


def test_a_decision_to_keep_everything_holds_while_there_is_room_in_any_case(monkeypatch):
    """The card is asked again only where what it has given so far is not plainly enough."""
    model, _ = decoder()
    tokens = torch.arange(16).view(2, 8) % 40
    sharded(model, params="device", optimizer="device", device_bytes="4MiB")
    found = decides(model)
    for _ in range(4):
        model(tokens, labels=tokens).loss.backward()
    assert found._room.sure_bytes() <= found._room.left_bytes()
    asked, free = [], found._room._card.free_bytes
    monkeypatch.setattr(found._room._card, "free_bytes", lambda: asked.append(free()) or asked[-1])
    model(tokens, labels=tokens).loss.backward()
    assert not asked
    found._room._card._card_bytes = unwall.api.engine(model).least_device_bytes + 1
    model(tokens, labels=tokens).loss.backward()
    assert asked
    assert set(found.used) != {"keep"}


def test_the_budget_covers_activations():
    """What the ledger has and what is held of activations, at each moment of forward."""
    model, loss_of = decoder()
    sharded(model, device_bytes="400KiB")
    found, engine, most = decides(model), unwall.api.engine(model), 0

    def look(*_):
        nonlocal most
        most = max(most, engine.device.ledger.live_bytes + found.held_bytes())

    for module in model.modules():
        module.register_forward_hook(look)
    for _ in range(4):
        loss_of().backward()
        model.zero_grad()
    assert 0 < most <= 400 << 10


# -- out of memory ----------------------------------------------------------------------------------------------------


class Fails:
    """Raises out-of-memory once in each of the calls whose numbers are given."""

    def __init__(self, *calls):
        self.calls, self.count = set(calls), 0

    def __call__(self, *_):
        self.count += 1
        if self.count in self.calls:
            raise torch.OutOfMemoryError("made up")


@pytest.mark.parametrize("make", [decoder, convolutions])
def test_an_out_of_memory_in_a_block_is_survived(make, kept):
    """With dropout and running statistics: the block that runs again draws and counts what it did."""

    def failing():
        model, loss_of = make()
        block = model.model.layers[1].mlp if make is decoder else model.stages[0][1].drop
        block.register_forward_hook(Fails(1, 4))  # 2 and 3: it runs once more, and again in backward
        return model, loss_of

    found = trained(failing, device_bytes="1GiB")
    same(found, kept[make])
    assert decides(found[2]).survived >= 1


def test_an_out_of_memory_elsewhere_is_raised():
    model, loss_of = decoder()
    model.lm_head.register_forward_hook(Fails(1))
    sharded(model, device_bytes="1GiB")
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        loss_of()
    loss_of().backward()


# -- habits -----------------------------------------------------------------------------------------------------------


def gradients_of(run, budget, **options):
    torch.manual_seed(0)
    model, loss_of = decoder()
    sharded(model, device_bytes=budget, **options)
    for _ in range(3):
        loss_of().backward()
        model.zero_grad()
    torch.manual_seed(2)
    run(model, loss_of)
    return model, [param.grad.clone() for param in model.parameters()]


def twice(_, loss_of):
    loss = loss_of()
    loss.backward(retain_graph=True)
    loss.backward()


def stopped(model, loss_of):
    loss = loss_of()
    handle = model.model.layers[2].register_forward_pre_hook(Fails(1))
    with pytest.raises(torch.OutOfMemoryError):
        loss_of()
    handle.remove()
    model.zero_grad()
    del loss
    loss_of().backward()


@pytest.mark.parametrize("run", [twice, stopped])
def test_graphs_that_are_used_twice_or_given_up(run):
    _, expected = gradients_of(run, None, activations="keep")
    model, found = gradients_of(run, "130KiB")
    assert set(decides(model).used) != {"keep"}
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("choice", CHOICES)
def test_compiled_blocks(choice, monkeypatch):
    monkeypatch.setattr(Observed, "best", lambda self, *_: everywhere(choice, self.blocks))

    def compiled():
        model, loss_of = decoder()
        model.config.attention_dropout = 0.0
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.0
            layer.compile(backend="aot_eager")
        return model, loss_of

    losses, _, _ = trained(compiled, activations="keep", steps=3)
    found, _, model = trained(compiled, device_bytes="1GiB", steps=3)
    assert set(decides(model).used) == {choice}
    assert found == pytest.approx(losses, rel=1e-5)


def test_a_model_that_checkpoints_is_left_alone():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = convolutions()[0]

        def forward(self, x):
            x = self.inner.stem(x)
            for stage in self.inner.stages:
                x = checkpoint(stage, x, use_reentrant=False)
            return x.mean()

    model = sharded(Checkpointed(), device_bytes="1GiB")
    with pytest.warns(UserWarning, match="Checkpointed checkpoints its blocks already"):
        model(torch.randn(1, 3, 12, 12)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(1, 3, 12, 12)).backward()
    assert decides(model).left_alone
    model, _ = decoder()
    model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="LlamaForCausalLM checkpoints already"):
        sharded(model, device_bytes="1GiB")


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def on_ranks(activations, budget, failing):
    """Losses, values, and what was done with the blocks. Rank 1's batch is longer, and its block may fail."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model, _ = decoder()
    if failing and rank == 1:
        model.model.layers[1].mlp.register_forward_hook(Fails(1))
    sharded(model, activations=activations, device_bytes=budget)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(96).view(2, 48)[:, : 12 + 12 * rank] % 40
    used = []
    torch.manual_seed(rank)
    for _ in range(5):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        used.append(tuple(decides(model).used) if activations == "auto" else ())
    return dict(model.state_dict()), used


def test_ranks_decide_alike(pool):
    (expected, _), _ = pool.run(on_ranks, "keep", None, False)
    (values, used), (_, others) = pool.run(on_ranks, "auto", "150KiB", False)
    assert used[3:] == others[3:]
    assert set(used[-1]) != {"keep"}
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_a_rank_alone_survives_an_out_of_memory(pool):
    (expected, _), _ = pool.run(on_ranks, "keep", None, False)
    (values, _), _ = pool.run(on_ranks, "auto", "64MiB", True)
    assert all(torch.equal(values[name], value) for name, value in expected.items())


class Skips(nn.Module):
    """Its blocks are checkpointed by itself, and may be left out."""

    def __init__(self):
        super().__init__()
        self.inner = convolutions()[0]

    def forward(self, x, skips):
        x = self.inner.stem(x)
        for stage in () if skips else self.inner.stages:
            x = checkpoint(stage, x, use_reentrant=False)
        return x.mean()


def blocks_on_one_rank():
    """Rank 0 comes to no checkpoint in its first batches. Whether the blocks are left alone, after each step."""
    rank, found = torch.distributed.get_rank(), []
    torch.manual_seed(0)
    model = sharded(Skips(), device_bytes="1GiB")
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        model(torch.ones(1, 3, 12, 12), skips=rank == 0 and step < 4).backward()
        optimizer.step()
        found.append(decides(model).left_alone)
    return found


@pytest.mark.filterwarnings("ignore:.*checkpoints its blocks already")
def test_only_one_rank_comes_to_a_checkpoint(pool):
    assert pool.run(blocks_on_one_rank) == [[False] * 4 + [True] * 2, [True] * 6]
