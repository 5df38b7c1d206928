"""An out-of-memory in a forward: what was cached is dropped and the module runs again, or the error is the user's."""

import random

import numpy as np
import pytest
import torch
from models_with_blocks import TOKENS, convolutions, decoder
from ranks import RankPool
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.runtime.own_state import OwnState

STEPS = 5
LATE = 4
"""By this pass all is measured, and there is room for everything."""


class Fails:
    """Raises out-of-memory in the calls whose numbers are given. ``done``: after the module has run."""

    def __init__(self, *calls):
        self.calls, self.count, self.raised = set(calls), 0, 0

    def __call__(self, *_):
        self.count += 1
        if self.count in self.calls:
            self.raised += 1
            raise torch.OutOfMemoryError("made up")


FAILING = {}


def inside(module, fails):
    """In the middle of its own forward, after it has computed. In that of its class: a layer with a forward of its own counts as
    the user's."""
    kind, forward = type(module), type(module).forward
    FAILING[module] = fails
    if forward.__name__ != "failing":

        def failing(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            FAILING.get(self, lambda: None)()
            return output

        kind.forward = failing
        FAILING[kind] = forward
    return fails


@pytest.fixture(autouse=True)
def as_before():
    yield
    for kind, forward in FAILING.items():
        if isinstance(kind, type):
            kind.forward = forward
    FAILING.clear()


def sharded(model, **options):
    plan = unwall.Plan(compute_dtype=torch.float32, **{"params": "host", "optimizer": "host", **options})
    return unwall.shard(model, plan)


def resident(model):
    return sum(group.residence.value == "resident" for group in unwall.api.engine(model).groups)


def losses(model, loss_of):
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def run(make, where=None, *calls, **options):
    torch.manual_seed(0)
    model, loss_of = make()
    fails = None if where is None else inside(where(model), Fails(*calls))
    sharded(model, **{"device_bytes": "1GiB", **options})
    return losses(model, loss_of), model, fails


@pytest.fixture(scope="module")
def calm():
    return {make: run(make)[0] for make in (decoder, convolutions)}


LAYERS = {
    "embedding": lambda model: model.model.embed_tokens,
    "head": lambda model: model.lm_head,
}


@pytest.mark.parametrize("where", LAYERS)
@pytest.mark.parametrize("activations", ["auto", "keep", "recompute", "host"])
def test_a_layer_outside_of_the_blocks(where, activations, calm):
    found, _, fails = run(decoder, LAYERS[where], 2, LATE, activations=activations)
    assert fails.raised == 2
    assert found == calm[decoder]
    assert fails.count == STEPS + 2


def test_what_was_cached_is_dropped_before_the_second_try():
    torch.manual_seed(0)
    model, loss_of = decoder()
    there, fails = [], Fails(LATE)

    def look():
        there.append(resident(model))
        fails()

    inside(model.lm_head, look)
    sharded(model, device_bytes="1GiB")
    losses(model, loss_of)
    first, again = there[LATE - 1 : LATE + 1]
    assert again < first


@pytest.mark.parametrize("calls", [(LATE,), (LATE, LATE + 3)])
def test_a_block_where_everything_is_kept(calls, calm):
    """With dropout: the block draws again what it drew."""
    found, model, fails = run(decoder, lambda model: model.model.layers[1].mlp, *calls)
    assert fails.raised == len(calls)
    assert found == calm[decoder]
    assert unwall.stats(model).activations.survived == len(calls)


def test_a_block_that_has_counted_already_is_not_tried_again_without_a_copy():
    """A batch norm has counted the batch: run again, it would count it twice."""
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        run(convolutions, lambda model: model.stages[0][1].drop, LATE)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.fails = Fails(LATE)

    def forward(self, x):
        x.mul_(2.0)
        output = self.inner(x)
        self.fails()
        return output


class Counts(nn.Module):
    """Puts another tensor in the place of its buffer."""

    def __init__(self, *calls):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.fails = Fails(*calls)

    def forward(self, x):
        self.calls = self.calls + 1
        output = self.inner(x) * self.calls
        self.fails()
        return output


@pytest.mark.parametrize("make", [InPlace, lambda: Counts(LATE)], ids=["input", "buffer"])
def test_a_block_that_has_written_is_not_tried_again(make):
    model = nn.Sequential(nn.Sequential(make(), make()), nn.Linear(8, 8))
    sharded(model, device_bytes="1GiB")
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        losses(model, lambda: model(torch.ones(2, 8)).square().mean())


def test_a_buffer_that_was_replaced_is_put_back_where_copies_are_taken():
    """In the first passes, which are measured."""
    values = []
    for calls in ((), (2,)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(Counts(*calls), Counts()), nn.Linear(8, 8))
        sharded(model, device_bytes="1GiB")
        values.append((losses(model, lambda model=model: model(torch.ones(2, 8)).square().mean()), model[0][0].calls.item()))
    assert values[0] == values[1]


class Keeps(nn.Module):
    """Reads and changes attributes of its own, in a way that two calls are not one, and then fails."""

    def __init__(self, kind, *calls):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kind, self.count, self.seen, self.by_name = kind, 0, [], {"losses": []}
        self.fails = Fails(*calls)

    def forward(self, x):
        output = self.inner(x)
        if self.kind == "count":
            self.count += 1
            output = output * self.count
        elif self.kind == "new":
            self.later = getattr(self, "later", 0) + 1
            output = output * self.later
        elif self.kind == "drawn":
            output = output * random.random() * np.random.rand()
        else:
            (self.seen if self.kind == "list" else self.by_name["losses"]).append(output.square().mean())
        self.fails()
        return output

    def losses(self):
        found = sum([*self.seen, *self.by_name["losses"]])
        self.seen.clear()
        self.by_name["losses"].clear()
        return found


@pytest.mark.parametrize("call", [1, 2, LATE])
@pytest.mark.parametrize("kind", ["count", "new", "drawn", "list", "dict"])
def test_what_a_block_keeps_in_attributes_is_put_back(kind, call):
    """In passes that are measured, and where everything is kept."""
    values = []
    for calls in ((), (call,)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        blocks = nn.ModuleList(nn.Sequential(Keeps(kind, *which)) for which in (calls, ()))
        model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 8))
        sharded(model, device_bytes="1GiB")

        def loss_of(model=model, blocks=blocks):
            for block in blocks:
                block[0].losses()  # what backward has put there when it computed a block again
            return model(torch.ones(2, 8)).square().mean() + sum(block[0].losses() for block in blocks)

        values.append(losses(model, loss_of))
        assert blocks[0][0].fails.raised == len(calls)
    assert values[0] == values[1]


def test_an_attribute_that_was_written_in_place_is_not_tried_again():
    class Adds(Keeps):
        def forward(self, x):
            self.by_name.setdefault("sum", torch.zeros(8)).add_(1.0)
            output = self.inner(x) + self.by_name["sum"]
            self.fails()
            return output

    model = nn.Sequential(nn.Sequential(Adds("", LATE), Adds("")), nn.Linear(8, 8))
    sharded(model, device_bytes="1GiB")
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        losses(model, lambda: model(torch.ones(2, 8)).square().mean())


@pytest.mark.parametrize(("kind", "noted"), [("count", True), ("", False)])
def test_what_changes_nothing_is_looked_at_in_its_first_calls_alone(kind, noted):
    class Plain(Keeps):
        def forward(self, x):
            return super().forward(x) if self.kind else self.inner(x)

    block = Plain(kind)
    state = OwnState(block)
    for _ in range(2):
        found = state.note()
        assert found is not None
        block(torch.ones(2, 8))
        state.ended(found)
    assert (state.note() is not None) == noted


# -- without gradients ------------------------------------------------------------------------------------------------


def evaluated(hook=None, **options):
    torch.manual_seed(0)
    model, _ = decoder()
    fails = inside(model.model.layers[1].mlp, Fails(2))
    sharded(model, device_bytes="1GiB")
    if hook is not None:
        model.model.layers[1].register_forward_hook(hook)
    model.eval()
    with torch.no_grad():
        return [model(TOKENS, **options).logits for _ in range(2)], fails


def test_a_block_without_gradients():
    (calm, tried), fails = evaluated(use_cache=False)
    assert fails.raised == 1
    assert torch.equal(calm, tried)


def test_what_a_block_has_put_into_a_cache_is_not_put_there_twice():
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        evaluated(use_cache=True)


def test_hooks_that_collect_see_each_call_once():
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        evaluated(hook=lambda *_: None, use_cache=False)


@pytest.mark.parametrize("call", [1, LATE])
def test_a_cache_with_gradients(call):
    """In eval mode a block keeps its cache: what it has put there stays."""
    torch.manual_seed(0)
    model, _ = decoder()
    inside(model.model.layers[1].mlp, Fails(call))
    sharded(model, device_bytes="1GiB")
    model.eval()
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        losses(model, lambda: model(TOKENS, labels=TOKENS, use_cache=True).loss)


# -- what is not tried again ------------------------------------------------------------------------------------------


def test_what_a_checkpoint_runs_is_raised():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    inside(model[1], Fails(1))
    sharded(model, device_bytes="1GiB")
    x = torch.ones(2, 8, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        checkpoint(model, x, use_reentrant=False)
    checkpoint(model, x, use_reentrant=False).sum().backward()


def test_a_second_failure_is_raised():
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        run(decoder, LAYERS["head"], 2, 3)


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks():
    pool = RankPool(2)
    yield pool
    pool.close()


def one_rank_fails(where):
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model, loss_of = decoder()
    fails = inside(LAYERS[where](model), Fails(*((2, LATE) if rank == 1 else ())))
    sharded(model, device_bytes="1GiB")
    return losses(model, loss_of), fails.raised


@pytest.mark.parametrize("where", LAYERS)
def test_one_of_two_ranks(where, two_ranks):
    (calm, _), (found, raised) = two_ranks.run(one_rank_fails, where)
    assert raised == 2
    assert calm == found
