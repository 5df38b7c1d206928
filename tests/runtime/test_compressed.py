"""Parameters and gradients that travel between ranks as small integers: what that changes, and what it must not."""

import contextlib
import itertools
import random
import zlib

import pytest
import torch
from faults import Boom
from faults import forward as forward_net
from offload import DEVICE, DISK, HOST, Setup, build, differing, outcome, over_budget, start, step, train
from ranks import rank_and_world
from reference import seeded
from torch import nn

import unwall
from unwall.planner import measure
from unwall.plans import Plan, PlanError
from unwall.shards.control import PeerError

BF16, FP16 = torch.bfloat16, torch.float16
INT8 = {"gather_dtype": "int8", "reduce_dtype": "int8"}
INT4 = {"gather_dtype": "int8", "reduce_dtype": "int4"}
FEEDBACK = {**INT4, "reduce_feedback": True}


# -- every tier, the first step, bf16 and fp16 ---------------------------------------------------------------------------


def compare(setups, folder):
    """What differs between the tiers, for each setup and way to travel."""
    wrong = []
    for setup, fields, placements in setups:
        expected, _ = train(setup, {**DEVICE, **fields}, folder)
        if any(not value.isfinite().all() for value in expected.values()):
            wrong.append(f"{setup}, {fields}: not finite")
        for placement in placements:
            got, _ = train(setup, {**placement, **fields}, folder)
            wrong += [f"{setup}, {fields}, {placement}: {name}" for name in differing(expected, got)]
    return wrong


RESIDENT, SPILLED = {"params": "device", "optimizer": "host"}, {"params": "host", "optimizer": "disk"}
REDUCED = {"reduce_dtype": "int4"}
SMALL = {"blocks": 3, "steps": 2}
CASES = [
    (Setup(dtype=BF16, clip=0.5, **SMALL), INT8, [HOST, RESIDENT]),
    (Setup(dtype=FP16, **SMALL), INT8, [DISK]),
    (Setup(dtype=BF16, passes=2, frozen=True, **SMALL), FEEDBACK, [HOST]),
    (Setup(dtype=BF16, passes=2, no_sync=True, **SMALL), INT4, [SPILLED]),
    (Setup(stage=1, dtype=FP16, clip=0.5, **SMALL), REDUCED, [HOST]),
]
"""Stages 1 and 2 gather parameters as they are where the flat buffer is their home: other values than from the host."""


def test_the_same_bits_from_every_tier(ranks, tmp_path):
    assert ranks(2).run(compare, CASES, str(tmp_path)) == [[], []]


@pytest.mark.drill
def test_every_combination(ranks, tmp_path):
    setups = [
        (Setup(stage=stage, dtype=dtype, clip=clip, **SMALL), fields, [HOST, DISK, SPILLED, RESIDENT])
        for stage, dtype, fields, clip in itertools.product(
            (0, 1, 2, 3), (BF16, FP16), (INT8, INT4, FEEDBACK, REDUCED), (None, 0.5)
        )
        if not (dtype is FP16 and "reduce_feedback" in fields) and (stage == 3 or "gather_dtype" not in fields)
    ]
    assert ranks(3).run(compare, setups, str(tmp_path)) == [[], [], []]


def test_a_rank_alone_has_nothing_to_compress(tmp_path):
    setup = Setup(dtype=BF16, **SMALL)
    expected, _ = train(setup, DEVICE, str(tmp_path))
    assert differing(expected, train(setup, {**HOST, **FEEDBACK}, str(tmp_path))[0]) == []


# -- what ranks compute with, and what is kept -------------------------------------------------------------------------


def look(folder, stage, placement):
    """What a rank computes with, before and after a step, and whether looking has changed anything."""
    setup = Setup(stage=stage, dtype=BF16, **SMALL)
    before = build(blocks=setup.blocks).state_dict()
    model, optimizer = start(setup, {**placement, **INT8}, folder)
    seen = []

    def note(module, _):
        for param in module.parameters(recurse=False):
            seen.append(zlib.crc32(param.detach().view(torch.uint8).numpy().tobytes()))

    handles = [module.register_forward_pre_hook(note) for module in model.modules() if not list(module.children())]
    exact = []
    for number in range(2):
        with torch.no_grad():
            model(torch.zeros(1, 64))
        state = model.state_dict()
        exact.append(number > 0 or all(torch.equal(value, before[name]) for name, value in state.items()))
        with unwall.full_params(model):
            exact.append(
                all(torch.equal(param.cpu(), state[name]) for name, param in model.named_parameters() if name in state)
            )
        step(model, optimizer, setup, number)
    for handle in handles:
        handle.remove()
    return seen, all(exact)


@pytest.mark.parametrize(("stage", "placement"), [(3, DISK), (2, DEVICE), (1, HOST)], ids=str)
def test_all_ranks_compute_with_the_same_bits_and_keep_the_exact_ones(ranks, tmp_path, stage, placement):
    (seen, exact), (theirs, theirs_exact) = ranks(2).run(look, str(tmp_path), stage, placement)
    assert seen == theirs
    assert exact
    assert theirs_exact


class Writer(nn.Module):
    """Writes one element of its weight in each forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        with torch.no_grad():
            self.weight[0, 0] = 3.0
        return x @ self.weight


def write_in_forward():
    model = seeded(Writer)
    before = model.weight.detach().clone()
    unwall.shard(model, Plan(**DEVICE, **INT8))
    model(torch.ones(1, 64)).sum().backward()
    before[0, 0] = 3.0
    state = model.state_dict()
    return not state or torch.equal(state["weight"], before)


def test_a_write_in_a_forward_changes_what_was_written_alone(ranks):
    assert ranks(2).run(write_in_forward) == [True, True]


# -- on the wire -------------------------------------------------------------------------------------------------------


def count(fields):
    """Bytes that came from other ranks in a step, parameters and gradients, and elements."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    unwall.shard(model, Plan(**DEVICE, **fields))
    optimizer = unwall.AdamW(model.parameters())
    unwall.stats(model).reset()
    model(torch.randn(2, 256)).float().square().mean().backward()
    optimizer.step()
    found = unwall.stats(model).collectives
    return [(found[name].bytes, found[name].elements) for name in ("all_gather", "reduce_scatter")]


def test_bytes_on_the_wire_are_those_of_the_formula(ranks):
    plain, int8, int4 = (ranks(2).run(count, fields)[0] for fields in ({}, INT8, INT4))
    for (nbytes, elements), bits in zip([*plain, *int8, *int4], (16, 16, 8, 8, 8, 4), strict=True):
        assert nbytes == pytest.approx(elements / 2 * (bits / 8 + (4 / 256 if bits < 16 else 0)), rel=0.03)
    assert int8[1][0] / plain[1][0] == pytest.approx(0.51, abs=0.01)
    assert int4[1][0] / plain[1][0] == pytest.approx(0.26, abs=0.01)


# -- the stress case: in each block one large gradient that cancels over the ranks ----------------------------------------


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(2048))

    def forward(self, target, sign):
        gradient = (self.at.detach().float() - target) * 0.05
        gradient[::256] += 20 * sign
        return (self.at * gradient.bfloat16()).sum()


def descend(fields, steps):
    """How far from its target a point stays. Plain rounding leaves 0.75 of 0.80."""
    rank, _ = rank_and_world()
    torch.manual_seed(0)
    target, model = torch.randn(2048), Point()
    unwall.shard(model, Plan(stage=2, **DEVICE, **fields))
    optimizer = unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.5))
    for number in range(steps):
        model(target, (number + rank) % 2 * 2 - 1).backward()
        optimizer.step()
    with unwall.full_params(model):
        away = (model.at.detach() - target)[torch.arange(2048) % 256 != 0]
    return float(away.abs().mean())


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"reduce_dtype": "int8"}, 0.02),
        ({"reduce_dtype": "int4"}, 0.3),
        ({"reduce_dtype": "int4", "reduce_feedback": True}, 0.4),
    ],
    ids=str,
)
def test_small_gradients_beside_large_ones_are_not_lost(ranks, fields, most):
    first, second = ranks(2).run(descend, fields, 400)
    assert first == second < most


class Bytes(nn.Module):
    """A language model of bytes: the last eight say what comes next."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.hidden = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.out = nn.Linear(256, 256)

    def forward(self, ids, target):
        logits = self.out(self.hidden(self.embed(ids).flatten(1)))
        return nn.functional.cross_entropy(logits.float(), target)


def text():
    """Made-up words, of which each has a few followers. The same for ever: files of the library change."""
    rng = random.Random(0)
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    words = ["".join(rng.choice(syllables) for _ in range(rng.randint(1, 3))) for _ in range(200)]
    followers = {word: [rng.choice(words) for _ in range(4)] for word in words}
    found = [words[0]]
    for _ in range(20_000):
        found.append(rng.choice(followers[found[-1]]))
    return " ".join(found).encode()


def read(ways):
    """The loss at the end of 300 steps over such a text, for each way to travel."""
    rank, _ = rank_and_world()
    data, found = torch.tensor(list(text())), []
    for fields in ways:
        model = seeded(Bytes)
        unwall.shard(model, Plan(**DEVICE, **fields))
        optimizer, losses = unwall.AdamW(model.parameters(), lr=2e-3), []
        draws = torch.Generator().manual_seed(rank)
        for _ in range(300):
            at = torch.randint(len(data) - 9, (64,), generator=draws)
            loss = model(data[at[:, None] + torch.arange(8)], data[at + 8])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found.append(sum(losses[-50:]) / 50)
    return found


@pytest.mark.drill
def test_a_language_model_learns_as_much(ranks):
    exact, *rounded = [sum(losses) / 2 for losses in zip(*ranks(2).run(read, [{}, INT8, INT4]), strict=True)]
    assert exact < 2.0
    assert max(rounded) < 1.1 * exact, (exact, rounded)


# -- again, after a fault, by other ways -----------------------------------------------------------------------------------


def resume(folder):
    """A run of four steps, and one that goes on from a checkpoint after two."""
    setup = Setup(dtype=BF16, **SMALL)
    model, optimizer = start(setup, {**HOST, **INT4}, folder)
    for number in range(4):
        if number == 2:
            unwall.save(f"{folder}/checkpoint", model, optimizer)
        step(model, optimizer, setup, number)
    expected = outcome(model, optimizer)
    model, optimizer = start(setup, {**DEVICE, **INT4}, folder)
    unwall.load(f"{folder}/checkpoint", model, optimizer)
    for number in (2, 3):
        step(model, optimizer, setup, number)
    return differing(expected, outcome(model, optimizer))


def test_a_run_that_is_resumed_comes_to_the_same_bits(ranks, tmp_path):
    assert ranks(2).run(resume, str(tmp_path)) == [[], []]


def struck(fields):
    """A run in which rank 1 fails in forward and in backward, and all go on."""
    rank, told = rank_and_world()[0], []
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
    unwall.shard(model, Plan(device_bytes="1MiB", **fields))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, speculate=False)

    def boom(*_):
        raise Boom("told to")

    for number in range(5):
        for attempt in range(3):
            handle = None
            if rank == 1 and attempt == 0 and number in (1, 3):
                hook = model[3][0].register_forward_hook if number == 1 else model[3][0].register_full_backward_hook
                handle = hook(boom)
            try:
                forward_net(model, number).backward()
                optimizer.step()
                break
            except (Boom, PeerError) as error:
                told.append(type(error).__name__)
                optimizer.zero_grad()
            finally:
                if handle is not None:
                    handle.remove()
    return told, {name: value.isfinite().all().item() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("fields", [INT8, {"stage": 0, "reduce_dtype": "int4"}], ids=str)
def test_all_ranks_go_on_after_a_fault_of_one(ranks, fields):
    (told, finite), (own, _) = ranks(2).run(struck, fields)
    assert told == ["PeerError", "PeerError"]
    assert own == ["Boom", "Boom"]
    assert all(finite.values())


class Experts(nn.Module):
    """Each rank uses an expert of its own, in an order of its own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.out = nn.Linear(128, 8)

    def forward(self, x):
        rank, _ = rank_and_world()
        for index in (rank, 2) if rank else (2, rank):
            x = torch.tanh(self.experts[index](x))
        return self.out(x)


def route(fields):
    model = seeded(Experts)
    unwall.shard(model, Plan(**DEVICE, **fields))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number in range(30):
        torch.manual_seed(number % 3)
        loss = model(torch.randn(8, 128)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


def test_ranks_may_use_modules_in_other_orders(ranks):
    for first, last in ranks(2).run(route, INT4):
        assert last < first / 3


def probed():
    """Rank 0 has patience for many rounds, the others for one."""
    patience, size = measure.LIMIT_S, measure.COPY_BYTES
    measure.LIMIT_S, measure.COPY_BYTES = 0.0 if rank_and_world()[0] else 60.0, 1 << 16
    try:
        return measure.collective_rate(torch.device("cpu"))
    finally:
        measure.LIMIT_S, measure.COPY_BYTES = patience, size


def test_links_are_probed_in_as_many_rounds_on_every_rank(ranks):
    assert all(rate > 0 for rate in ranks(2).run(probed))


def tight(fields, folder):
    """The smallest budget that is accepted is enough, and is kept."""
    setup, model = Setup(dtype=BF16), build(blocks=3)
    needed = 1
    for _ in range(3):
        try:
            unwall.shard(model, Plan(disk=folder, device_bytes=needed, **fields))
            break
        except PlanError as error:
            needed = error.lack[1]
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        step(model, optimizer, setup, number)
    return over_budget(model), unwall.stats(model).tiers["device"].budget_bytes


@pytest.mark.parametrize("fields", [{**DEVICE, **FEEDBACK}, {**HOST, **INT8}, {**RESIDENT, **INT8}], ids=str)
def test_an_accepted_budget_is_enough(ranks, fields, tmp_path):
    for over, budget in ranks(2).run(tight, fields, str(tmp_path)):
        assert over == []
        assert budget is not None


# -- plans -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gather_dtype": "int4"}, "gather_dtype is 'int8' or None, got 'int4'"),
        ({"gather_dtype": torch.int8}, "gather_dtype is 'int8' or None"),
        ({"reduce_dtype": "int2"}, "'int8', 'int4' or None, got 'int2'"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype is torch.bfloat16"),
        ({"reduce_feedback": True}, "write reduce_dtype='int4' or 'int8' with it"),
        ({"reduce_feedback": 1, "reduce_dtype": "int4"}, "reduce_feedback is True or False"),
        ({"reduce_feedback": True, "reduce_dtype": "int4", "compute_dtype": FP16}, "loss scale"),
        ({"reduce_dtype": "int8", "compute_dtype": torch.float32}, "computes in 16 bits"),
        ({"gather_dtype": "int8", "stage": 0}, "stage 0 never does"),
    ],
)
def test_a_plan_that_cannot_travel_like_that_is_refused(fields, words):
    with pytest.raises(PlanError, match=words):
        Plan(**fields)


@torch.no_grad()
def full_card(every):
    """Outputs, the first of which count, where on rank 0 the card has at every few gathers no memory for what travels."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    unwall.shard(model, Plan(params="host", optimizer="host", device_bytes="80KiB", gather_dtype="int8"))
    batch = torch.ones(2, 64, dtype=BF16)
    expected = [model(batch) for _ in range(3)][-1]
    device, asked = unwall.api.engine(model).tiers.device, []
    allocate = device.allocate

    def allocate_late(nbytes, label):
        asked.append(label)
        if rank_and_world()[0] == 0 and len(asked) % every == 0:
            device.ledger.reclaim()
        return allocate(nbytes, label)

    device.allocate = allocate_late
    found = [torch.equal(model(batch), expected) for _ in range(3)]
    return len(asked) > 16, found


@pytest.mark.parametrize("every", [1, 3])
def test_what_is_being_fetched_is_not_dropped_for_what_it_travels_in(every, ranks):
    assert ranks(2).run(full_card, every, limit_s=60) == [(True, [True] * 3)] * 2


@torch.no_grad()
def taken_behind_a_copy():
    """How many gathers began behind a copy, and what took memory of the device meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    unwall.shard(model, Plan(params="host", optimizer="host", device_bytes="80KiB", gather_dtype="int8"))
    engine, inside, taken = unwall.api.engine(model), [], []
    device, ranks = engine.tiers.device, engine.ranks
    allocate, behind = device.allocate, ranks.behind

    def allocated(nbytes, label):
        taken.extend([label] if inside and inside[-1] else [])
        return allocate(nbytes, label)

    @contextlib.contextmanager
    def noted(work):
        with behind(work):
            inside.append(True)
            yield
            inside.append(False)

    device.allocate, ranks.behind = allocated, noted
    model(torch.ones(2, 64, dtype=BF16))
    return inside.count(True), taken


def test_memory_is_taken_where_compute_goes_on(ranks):
    """On an accelerator what is dropped for it is waited for there. See [Note: behind a copy] in shards/collectives.py."""
    assert ranks(2).run(taken_behind_a_copy) == [(16, [])] * 2
