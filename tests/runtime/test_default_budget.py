"""Without ``device_bytes``: what is fetched stays as far as the card has room for it. A card that is made up stands for a real one,
whose memory no test without one can run out of."""

import pytest
import torch
from offload import HOST, build

import unwall
from unwall.plans import Plan
from unwall.runtime import assemble
from unwall.schedule.limit import Allocated

BLOCKS, WIDTH = 12, 64
LARGE = 1 << 24


class Card:
    """``held``: what is allocated beside ours at the moment."""

    def __init__(self, card_bytes):
        self.card_bytes, self.held, self.failures, self.peak = card_bytes, 0, 0, 0
        self.ledger = None

    def free_bytes(self):
        return self.card_bytes

    def allocated(self):
        now = self.held + (self.ledger.live_bytes if self.ledger else 0)
        self.peak = max(self.peak, now)
        return Allocated(0, now, self.peak, self.failures)


class Trained:
    """A model with its states on the host, on a card of some size."""

    def __init__(self, monkeypatch, card_bytes):
        self.card = Card(card_bytes)
        monkeypatch.setattr(assemble, "probe_of", lambda _: self.card)
        self.model = unwall.shard(build(blocks=BLOCKS, width=WIDTH), Plan(**HOST, compute_dtype=torch.float32))
        self.engine = unwall.api.engine(self.model)
        self.card.ledger = self.engine.tiers.device.ledger
        self.optimizer = unwall.AdamW(self.model.parameters())
        for layer in self.model:  # activations that grow in forward
            layer.register_forward_hook(lambda *_: self.hold(self.kept))
        self.kept = 0
        self.flats = sum(group.fetch_bytes for group in self.engine.groups)

    def hold(self, nbytes):
        self.card.held += nbytes

    def step(self, kept=0):
        """The most that was held on the device, and how much was fetched."""
        unwall.stats(self.model).reset()
        self.card.held, self.kept = 0, kept
        self.model(torch.randn(2, WIDTH)).square().mean().backward()
        self.card.held = 0
        self.optimizer.step()
        found = unwall.stats(self.model)
        return found.tiers["device"].peak_bytes, found.links["host>device"].moved_bytes


@pytest.fixture
def trained(monkeypatch):
    return lambda card_bytes: Trained(monkeypatch, card_bytes)


def test_with_room_everything_stays_from_forward_to_backward(trained):
    run = trained(LARGE)
    first, fetched = run.step()
    assert first < run.flats
    assert fetched > run.flats  # the first pass holds only what it needs
    _, fetched = run.step()
    assert fetched == run.flats


def test_where_activations_leave_no_room_the_model_is_never_whole_on_the_device(trained):
    run = trained(LARGE)
    for _ in range(3):
        peak, _ = run.step(kept=LARGE // BLOCKS)
        assert peak < run.flats


def test_a_longer_batch_finds_room_before_its_activations_take_it(trained):
    run = trained(8 * 3 * (1 << 18))
    for _ in range(3):
        roomy, _ = run.step(kept=1 << 10)
    assert roomy > run.flats
    tight, _ = run.step(kept=3 << 18)
    assert tight < run.flats


def test_after_an_out_of_memory_the_next_pass_holds_little(trained):
    run = trained(LARGE)
    run.step()
    roomy, _ = run.step()
    run.card.failures += 1
    careful, _ = run.step()
    assert careful < run.flats < roomy


def test_the_same_values_whatever_is_dropped(trained):
    values = []
    for kept in (0, LARGE // BLOCKS):
        torch.manual_seed(3)
        run = trained(LARGE)
        for _ in range(3):
            run.step(kept)
        values.append(run.model.state_dict())
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


def test_an_allocation_that_fails_is_tried_again_without_the_cache(trained, monkeypatch):
    """Once in forward, when a group is fetched."""
    run = trained(LARGE)
    run.step()
    tier, before = run.engine.tiers.device, []
    insist, after = tier._insist, Watch(tier.ledger)

    def short(take):
        def once():
            if not before and sum(group.residence.value == "resident" for group in run.engine.groups) > 3:
                before.append(tier.ledger.live_bytes)
                raise torch.OutOfMemoryError("made up")
            return take()

        return insist(once)

    monkeypatch.setattr(tier, "_insist", short)
    tier.ledger.ask_before_refusing(after.note)  # asked after the executor, which has dropped what it could
    run.step()
    assert len(before) == len(after.live) == 1
    assert after.live[0] < before[0]


class Watch:
    def __init__(self, ledger):
        self.ledger, self.live = ledger, []

    def note(self):
        self.live.append(self.ledger.live_bytes)
