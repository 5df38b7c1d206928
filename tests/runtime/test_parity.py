"""Training through unwall is training with plain PyTorch: every stage, one rank or several."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from ranks import rank_and_world
from reference import (
    FP32,
    Case,
    adamw,
    assert_close,
    assert_equal,
    assert_losses,
    average_gradients,
    check_parity,
    draw,
    seeded,
    train_plain,
    train_unwall,
    unwall_adamw,
    whole_state,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import unwall
from unwall.plans import Plan

STAGES = (0, 1, 2, 3)
WORLDS = (1, 2, 4)
VOCABULARY, WIDTH = 64, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TokenNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens():
    return torch.randint(VOCABULARY, (4, 12)), torch.randint(VOCABULARY, (4, 12))


def cross_entropy(model, batch):
    inputs, target = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), target.flatten())


def default_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def default_unwall_adamw(model):
    return unwall.AdamW(model.parameters(), lr=1e-3)


CASE = Case(build=TokenNet, batch=tokens, loss=cross_entropy)


def plan_of(stage):
    return Plan(stage=stage, compute_dtype=torch.float32)


@pytest.fixture(scope="module")
def trained(ranks):
    """The 20 steps of a stage and world size, trained once and compared by several tests."""

    @functools.cache
    def train(stage, world, tight=False):
        return ranks(world).run(train_unwall, CASE, plan_of(stage), steps=20, optimizer=default_unwall_adamw, tight=tight)

    return train


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_twenty_steps_match_plain_pytorch(trained, stage, world):
    plain = train_plain(CASE, world=world, steps=20, optimizer=default_adamw)
    assert_losses(plain.losses, trained(stage, world))
    assert_close(plain.state, trained(stage, world)[0].state)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_are_identical_bit_by_bit(trained, stage, world):
    assert [run.losses for run in trained(stage, world)] == [run.losses for run in trained(0, world)]
    assert_equal(trained(stage, world)[0].state, trained(0, world)[0].state)


@pytest.mark.parametrize("world", WORLDS)
def test_streaming_under_a_small_budget_is_identical_bit_by_bit(trained, world):
    assert_equal(trained(3, world, tight=True)[0].state, trained(3, world)[0].state)


def test_training_has_moved_every_parameter(trained):
    """Guards the comparisons above: equal because trained, not because nothing happened."""
    start = TokenNet().state_dict()
    for name, value in trained(3, 2)[0].state.items():
        assert not torch.equal(value, start[name]), name


def in_halves(case, model, optimizer, batch, step, rank):
    """Two backward calls before the step."""
    inputs, target = batch
    total = torch.zeros(())
    for half in (slice(0, 2), slice(2, 4)):
        loss = case.loss(model, (inputs[half], target[half])) / 2
        loss.backward()
        total += loss.detach()
    return total


def in_halves_without_sync(case, model, optimizer, batch, step, rank):
    """The same, and the ranks exchange gradients in the second backward only."""
    inputs, target = batch
    first, second = ((inputs[half], target[half]) for half in (slice(0, 2), slice(2, 4)))
    with unwall.no_sync(model) if isinstance(optimizer, unwall.AdamW) else contextlib.nullcontext():
        loss = case.loss(model, first) / 2
        loss.backward()
    last = case.loss(model, second) / 2
    last.backward()
    return loss.detach() + last.detach()


@pytest.mark.parametrize("iterate", [in_halves, in_halves_without_sync])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_backward_calls_accumulate_until_the_step(ranks, stage, world, iterate):
    case = Case(build=TokenNet, batch=tokens, loss=cross_entropy, iterate=iterate)
    check_parity(ranks(world), case, plan_of(stage))


def test_accumulation_streams(ranks):
    case = Case(build=TokenNet, batch=tokens, loss=cross_entropy, iterate=in_halves_without_sync)
    check_parity(ranks(2), case, FP32, tight=True)


def communicated_in_no_sync(stage):
    model = TokenNet()
    unwall.shard(model, plan_of(stage))
    batch = tokens()
    cross_entropy(model, batch).backward()
    unwall.stats(model).reset()
    with unwall.no_sync(model):
        cross_entropy(model, batch).backward()
    inside = unwall.stats(model).collectives["reduce_scatter"].elements
    cross_entropy(model, batch).backward()
    return inside, unwall.stats(model).collectives["reduce_scatter"].elements


@pytest.mark.parametrize("stage", STAGES[1:])
def test_no_sync_reduces_nothing_inside(ranks, stage):
    for inside, after in ranks(2).run(communicated_in_no_sync, stage):
        assert inside == 0
        assert after >= sum(parameter.numel() for parameter in TokenNet().parameters())


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 4)])
def test_clipping_by_the_global_norm(ranks, stage, world, max_norm):
    clipped = functools.partial(unwall_adamw, max_grad_norm=max_norm)
    got = check_parity(ranks(world), CASE, plan_of(stage), optimizer=clipped, plain_max_grad_norm=max_norm)
    norms = train_plain(CASE, world=world, max_grad_norm=max_norm).norms
    assert min(norms) > 0.1  # so 0.05 clips at every step, and 1000 at none
    for run in got:
        assert run.norms == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_step_without_new_gradients_changes_nothing(ranks, world):
    check_parity(ranks(world), CASE, repeat_step=2)


def drop_then_train(plan, by_model):
    """A backward that is dropped, then a step with nothing to do, then one real step."""
    torch.manual_seed(0)
    model = TokenNet()
    unwall.shard(model, plan)
    optimizer = unwall_adamw(model)
    start = whole_state(model)
    torch.manual_seed(1)
    dropped, kept = tokens(), tokens()
    cross_entropy(model, dropped).backward()
    (model if by_model else optimizer).zero_grad()
    shown = [all(parameter.grad is None for parameter in model.parameters())]
    optimizer.step()
    idle = whole_state(model)
    cross_entropy(model, kept).backward()
    shown.append(all(parameter.grad is not None for parameter in model.parameters()))
    optimizer.step()
    shown.append(all(parameter.grad is None for parameter in model.parameters()))
    return start, idle, whole_state(model), shown


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("by_model", [False, True], ids=["optimizer", "model"])
def test_zero_grad_drops_gradients(ranks, by_model, stage, world):
    start, idle, end, shown = ranks(world).run(drop_then_train, plan_of(stage), by_model)[0]
    assert_equal(start, idle)
    torch.manual_seed(0)
    model = TokenNet()
    optimizer = adamw(model)
    torch.manual_seed(1)
    _, kept = tokens(), tokens()
    cross_entropy(model, kept).backward()
    optimizer.step()
    assert_close(model.state_dict(), end)
    assert shown == [True, True, True]  # none after zero_grad, some after backward, none after step


def start_apart():
    """Every rank builds a model of its own."""
    model = seeded(TokenNet, seed=rank_and_world()[0])
    unwall.shard(model, FP32)
    return whole_state(model)


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_start_from_the_model_of_rank_0(ranks, world):
    assert_equal(seeded(TokenNet, seed=0).state_dict(), ranks(world).run(start_apart)[0])


def train_in_pairs(plan):
    """Four ranks as two rows: each row trains a model of its own over its two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "data"))
    row, place = mesh["rows"].get_local_rank(), mesh["data"].get_local_rank()
    model = seeded(TokenNet)
    unwall.shard(model, plan, mesh=mesh["data"])
    optimizer = unwall_adamw(model)
    for step in range(3):
        cross_entropy(model, draw(CASE, step + 10 * row, place, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with unwall.full_params(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_a_pair(row):
    replicas = [seeded(TokenNet) for _ in range(2)]
    optimizers = [adamw(replica) for replica in replicas]
    for step in range(3):
        for place, replica in enumerate(replicas):
            cross_entropy(replica, draw(CASE, step + 10 * row, place, 2)).backward()
        average_gradients(replicas)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return dict(replicas[0].named_parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_dimension_of_a_device_mesh(ranks, stage):
    results = ranks(4).run(train_in_pairs, plan_of(stage))
    for rank, got in enumerate(results):
        assert_close(train_a_pair(row=rank // 2), got)
