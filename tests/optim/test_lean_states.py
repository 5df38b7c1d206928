"""``AdamW(states="lean")``: the same bits wherever states live and whatever runs ahead, close to exact states, and refusals."""

import weakref

import pytest
import torch
from early_tools import DEVICE, HOST, backward, build, on_disk, outcome, start, steps
from letting_go import gone
from ranks import RankPool
from torch import nn

import unwall
from unwall.plans import Plan


@pytest.fixture(scope="module")
def pool():
    made = RankPool(2)
    yield made
    made.close()


def trained(plan, scenario, **options):
    model, optimizer = start(plan, **options)
    scenario(model, optimizer)
    found = outcome(model, optimizer)
    return found, unwall.stats(model)


def differing(expected, got):
    return [name for name in expected if not torch.equal(expected[name], got[name])]


def five(model, optimizer):
    steps(model, optimizer, 5)


def test_every_tier_and_what_runs_ahead_give_the_same_bits(tmp_path):
    expected, _ = trained(DEVICE, five, states="lean")
    ways = {
        "host": (HOST, {}),
        "host, nothing ahead": (HOST, {"speculate": False}),
        "host, in backward": (HOST, {"update_in_backward": True}),
        "disk": (on_disk(tmp_path), {}),
        "disk, in backward": (on_disk(tmp_path), {"update_in_backward": True}),
        "by plan": ({**HOST, "states": "lean"}, {"states": None}),
    }
    for name, (plan, options) in ways.items():
        got, stats = trained(plan, five, **{"states": "lean", **options})
        assert (name, differing(expected, got)) == (name, [])
        if name in ("host", "disk"):
            assert stats.speculated.committed > 0


def test_clipping_loss_scale_and_accumulation_give_the_same_bits(tmp_path):
    def scenario(model, optimizer):
        for seed in range(3):
            backward(model, 2 * seed, scale=100.0)
            backward(model, 2 * seed + 1, scale=100.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.manual_seed(9)
        optimizer.scale(model(torch.randn(4, 64)).float().square().mean()).backward()
        optimizer.step()

    expected, _ = trained(DEVICE, scenario, states="lean", max_grad_norm=0.5)
    for plan in (HOST, on_disk(tmp_path)):
        got, _ = trained(plan, scenario, states="lean", max_grad_norm=0.5)
        assert differing(expected, got) == []


def test_lean_is_close_to_exact():
    exact, _ = trained(HOST, five)
    lean, _ = trained(HOST, five, states="lean")
    for name in (name for name in exact if name.endswith("weight")):
        moved = (exact[name] - build().state_dict()[name]).norm()
        assert float((lean[name] - exact[name]).norm()) < 0.1 * float(moved)


def test_states_take_five_bytes_per_parameter():
    model, optimizer = start({**HOST, "states": "lean"})
    groups = unwall.api.engine(model).groups
    elements = sum(group.own_numel for group in groups)
    held = sum(group.param.nbytes + sum(store.nbytes for store in group.states.values()) for group in groups)
    assert held == 5 * elements
    assert unwall.stats(model).tiers["host"].live_bytes == 5 * elements
    del optimizer


def in_ranks(stage, folder):
    plan = {**(HOST if folder is None else on_disk(folder)), "stage": stage}
    got, _ = trained(plan, five, states="lean")
    return got


@pytest.mark.parametrize("stage", [1, 3])
def test_several_ranks(pool, stage, tmp_path):
    """Every rank sees the same batch, so the average of the gradients is that of one rank, and so are all bits: blocks and
    random bits do not depend on how the parameters are cut."""
    alone, _ = trained(HOST, five, states="lean")
    got = pool.run(in_ranks, stage, tmp_path if stage == 3 else None)[0]
    assert differing(alone, got) == []


def test_states_by_hand(tmp_path):
    for plan in (HOST, on_disk(tmp_path)):
        model, optimizer = start(plan, states="lean")
        steps(model, optimizer, 2)
        weight = model[3][0].weight
        states, other = optimizer.states(weight), optimizer.states(model[3][2].weight)["exp_avg"]
        assert set(states) == {"exp_avg", "exp_avg_sq", "step", "master"}
        mean = states["exp_avg"]
        states["exp_avg_sq"] = torch.full_like(mean, 0.25)
        states["exp_avg"] = torch.full_like(mean, -0.5)
        assert bool((states["exp_avg_sq"] == 0.25).all())
        assert bool((states["exp_avg"] == -0.5).all())
        assert torch.equal(optimizer.states(model[3][2].weight)["exp_avg"], other)
        states["exp_avg"] = mean * 0
        assert float(states.part("exp_avg").abs().max()) == 0.0


def test_state_dicts_go_between_exact_and_lean():
    model, optimizer = start(HOST, states="lean")
    steps(model, optimizer, 3)
    weights, states = model.state_dict(), optimizer.state_dict()
    for kind, other_plan in (("exact", DEVICE), ("lean", DEVICE)):
        other, loaded = start(other_plan, states=kind)
        other.load_state_dict(weights)
        loaded.load_state_dict(states)
        assert differing(outcome(model, optimizer), outcome(other, loaded)) == []
        if kind == "lean":  # and goes on with the same bits
            steps(other, loaded, 2, first=3)
            steps(model, optimizer, 2, first=3)
            assert differing(outcome(model, optimizer), outcome(other, loaded)) == []


def test_states_move(tmp_path):
    """From tier to tier between steps, beside a run that stays where it is."""
    expected, _ = trained(HOST, five, states="lean")
    model, optimizer = start({**HOST, "states": "lean"})
    steps(model, optimizer, 2)
    unwall.move(model, Plan(**on_disk(tmp_path), states="lean"))
    steps(model, optimizer, 2, first=2)
    unwall.move(model, Plan(**DEVICE, states="lean"))
    steps(model, optimizer, 1, first=4)
    assert differing(expected, outcome(model, optimizer)) == []


def test_another_optimizer_takes_over():
    model, optimizer = start(HOST, states="lean")
    steps(model, optimizer, 1)
    before = model.state_dict()
    with pytest.raises(ValueError, match="another optimizer keeps lean states"):
        unwall.AdamW(model.parameters())
    kept = weakref.ref(optimizer)
    del optimizer
    assert gone(lambda: kept() is None)
    exact = unwall.AdamW(model.parameters(), lr=1e-2)
    assert differing(before, model.state_dict()) == []
    assert not any(group.lean for group in unwall.api.engine(model).groups)
    steps(model, exact, 1)
    with pytest.raises(ValueError, match="another optimizer keeps exact states"):
        unwall.AdamW(model.parameters(), states="lean")


def test_fp32_parts_of_a_model_have_exact_states():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    unwall.shard(model, Plan(states="lean", keep_fp32=lambda name, _: name.startswith("1")))
    optimizer = unwall.AdamW(model.parameters())
    model(torch.randn(4, 8)).float().sum().backward()
    optimizer.step()
    assert optimizer.states(model[1].weight)["exp_avg"].dtype is torch.float32
    assert {tuple(sorted(key.name for key in group.states)) for group in unwall.api.engine(model).groups} == {
        ("moments", "remainder"),
        ("exp_avg", "exp_avg_sq"),
    }


def test_refusals_say_what_to_write():
    with pytest.raises(ValueError, match=r"compute_dtype=torch.bfloat16"):
        Plan(states="lean", compute_dtype=torch.float32)
    with pytest.raises(ValueError, match="'exact' or 'lean'"):
        Plan(states="thin")
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(ValueError, match=r"Plan\(compute_dtype=torch.bfloat16\)"):
            start(HOST, dtype, states="lean")
    with pytest.raises(ValueError, match="'exact' or 'lean'"):
        start(HOST, states="thin")
    with pytest.raises(ValueError, match="speculate=True"):
        start(HOST, states="lean", speculate="journal")
    with pytest.raises(ValueError, match=r"Plan\(states='exact'\)"):
        start({**HOST, "states": "lean"}, states="exact")
    model = build()
    unwall.shard(model, Plan(states="lean"))
    with pytest.raises(ValueError, match=r"unwall.AdamW"):
        unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_budget_that_only_lean_states_fit():
    numel = sum(param.numel() for param in build().parameters())
    plan = {**HOST, "host_bytes": 11 * numel}
    with pytest.raises(ValueError, match="host"):
        start(plan)
    model, optimizer = start({**plan, "states": "lean"})
    steps(model, optimizer, 1)


def rare(states):
    """The loss of tokens that are rarely seen, after rows of a table got a gradient only now and then."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, 24), nn.Linear(24, 16))
    labels = torch.randint(16, (512,), generator=generator)
    often = 1 / torch.arange(1, 513)
    unwall.shard(model, Plan(**HOST))
    optimizer = unwall.AdamW(model.parameters(), lr=2e-2, states=states)
    seen = torch.zeros(512)
    for _ in range(150):
        ids = torch.multinomial(often, 16, replacement=True, generator=generator)
        seen[ids] += 1
        nn.functional.cross_entropy(model(ids).float(), labels[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()
    chosen = torch.nonzero((seen > 0) & (seen < 8)).flatten()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(chosen).float(), labels[chosen]))


def test_rare_rows_learn_as_with_exact_states():
    exact, lean = rare("exact"), rare("lean")
    assert exact < 2.0  # from 2.9
    assert abs(lean - exact) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_on_an_accelerator():
    """Whatever updates on the device rounds as the native kernel does. See test_lean_device.py."""
    results = []
    for plan in (DEVICE, HOST):
        model, optimizer = start(plan, states="lean", max_grad_norm=1.0)
        for seed in range(3):
            torch.manual_seed(seed)
            inputs, target = torch.randn(16, 64).cuda(), torch.randn(16, 8).cuda()
            (model(inputs).float() - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.cpu().float() for name, value in outcome(model, optimizer).items()})
    for name, value in results[0].items():
        assert float((results[1][name] != value).float().mean()) < 0.01
