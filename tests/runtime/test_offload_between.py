"""What a user may do between two calls: load, look, change, discard, fail. A model on host or disk must not notice."""

import errno
import gc

import pytest
import torch
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.native.disk import DiskEngine
from unwall.optim import policy
from unwall.plans import Plan


@pytest.fixture(autouse=True)
def _speculate_early(monkeypatch):
    monkeypatch.setattr(policy, "CLIP_MEMORY", 1)


def build(depth=6):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(depth)])


def sharded(tier, folder, depth=6):
    model = build(depth)
    disk = {"disk": folder} if tier == "disk" else {}
    unwall.shard(model, Plan(params=tier, optimizer=tier, compute_dtype=torch.float32, **disk))
    return model


def backward(model, seed):
    torch.manual_seed(seed)
    model(torch.randn(8, 64)).square().mean().backward()


def same_on(tiers, scenario, folder):
    """A scenario with everything on the device, and on other tiers: the same values everywhere."""
    expected = scenario(sharded("device", folder))
    for tier in tiers:
        got = scenario(sharded(tier, folder))
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == [], tier


OFF_DEVICE = ("host", "disk")


def test_loading_after_a_forward(tmp_path):
    """A resident group that one parameter is written into takes nothing away from those that are being loaded."""

    def scenario(model):
        values = {name: torch.randn_like(value) for name, value in sorted(build().state_dict().items())}
        with torch.no_grad():
            model(torch.randn(2, 64))
        model.load_state_dict(values)
        with torch.no_grad():
            model(torch.randn(2, 64))
        with unwall.full_params(model, write=True), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        return model.state_dict()

    same_on(OFF_DEVICE, scenario, tmp_path)


def test_two_optimizers_share_groups(tmp_path):
    def scenario(model):
        weights = [param for name, param in model.named_parameters() if "weight" in name]
        biases = [param for name, param in model.named_parameters() if "bias" in name]
        both = [unwall.AdamW(weights, lr=1e-2), unwall.AdamW(biases, lr=1e-3)]
        for seed in range(4):
            backward(model, seed)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    same_on(OFF_DEVICE, scenario, tmp_path)


@pytest.mark.parametrize("tier", ["device", *OFF_DEVICE])
def test_two_optimizers_that_share_groups_do_as_in_pytorch(tier, tmp_path):
    """What one has used does not count for the other: not in its norm, and not in what further backwards add to."""
    clip, results = 1e-3, []
    for model in (build(), sharded(tier, tmp_path)):
        weights = [param for name, param in model.named_parameters() if "weight" in name]
        biases = [param for name, param in model.named_parameters() if "bias" in name]
        if results:
            first, second = unwall.AdamW(weights, lr=1e-2), unwall.AdamW(biases, lr=1e-2)
        else:
            first, second = torch.optim.AdamW(weights, lr=1e-2), torch.optim.AdamW(biases, lr=1e-2)
        norms = []
        for seed in range(4):
            backward(model, seed)
            if seed % 2:
                backward(model, 10 + seed)
            first.step()
            first.zero_grad()
            if seed % 2:
                norms.append(float(second.clip_grad_norm_(clip) if results else nn.utils.clip_grad_norm_(biases, clip)))
            second.step()
            second.zero_grad()
        results.append((norms, {name: value.clone() for name, value in model.state_dict().items()}))
    (norms, expected), (got_norms, got) = results
    assert got_norms == pytest.approx(norms, rel=1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)


def test_a_model_loaded_between_backward_and_step(tmp_path):
    def scenario(model):
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        for seed in range(4):
            backward(model, seed)
            if seed == 3:
                model.load_state_dict(build().state_dict())
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    same_on(OFF_DEVICE, scenario, tmp_path)


def test_parameters_changed_between_backward_and_step(tmp_path):
    def scenario(model):
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        for seed in range(5):
            backward(model, seed)
            if seed == 3:
                with unwall.full_params(model, write=True), torch.no_grad():
                    for param in model.parameters():
                        param.clamp_(-0.05, 0.05)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    same_on(OFF_DEVICE, scenario, tmp_path)


def test_optimizer_state_loaded_between_backward_and_step(tmp_path):
    def scenario(model):
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        for seed in range(3):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()
        for seed in range(3, 6):
            backward(model, seed)
            if seed == 5:
                optimizer.load_state_dict(saved)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    same_on(OFF_DEVICE, scenario, tmp_path)


def test_a_discarded_batch_leaves_nothing_behind(tmp_path):
    """Its gradients were NaN, and the next batch uses only a part of the model."""

    def scenario(model):
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        for seed in range(3):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        (model(torch.full((2, 64), float("nan"))).sum()).backward()
        optimizer.zero_grad()
        model[4:](torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        return model.state_dict()

    same_on(OFF_DEVICE, scenario, tmp_path)


def test_resuming_after_an_evaluation(tmp_path):
    saved = {}

    def scenario(model):
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        if not saved:
            backward(model, 0)
            optimizer.step()
            saved.update(model=model.state_dict(), optimizer=optimizer.state_dict())
            model = sharded("device", tmp_path)
            optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        model.load_state_dict(saved["model"])
        with torch.no_grad():
            model(torch.randn(2, 64))  # now nothing has to be fetched for the next step
        optimizer.load_state_dict(saved["optimizer"])
        backward(model, 1)
        optimizer.step()
        for group in unwall.api.engine(model).groups:
            group.pending.settle()  # before anyone looks: looking would write back what was loaded
        return {**model.state_dict(), **{str(n): entry["exp_avg"] for n, entry in optimizer.state_dict()["state"].items()}}

    same_on(OFF_DEVICE, scenario, tmp_path)


def test_wrap_after_adamw(tmp_path):
    def scenario(model):
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        other = unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        backward(model, 1)
        other.step()
        return model.state_dict()

    same_on(("host",), scenario, tmp_path)


def test_full_params_that_fails_half_way_can_be_repeated(tmp_path):
    model = sharded("disk", tmp_path)
    disk = unwall.api.engine(model).tiers.disk.engine
    disk.inject_fault("read", 3, 1, errno.EIO)
    with pytest.raises(OSError, match="group"), unwall.full_params(model):
        pass
    with unwall.full_params(model):
        assert all(param.isfinite().all() for param in model.parameters())
    assert model(torch.randn(2, 64)).isfinite().all()


def test_a_shard_that_fails_half_way_gives_the_model_back(tmp_path, monkeypatch):
    made = DiskEngine.__init__

    def failing(engine, *args, **kwargs):
        made(engine, *args, **kwargs)
        engine.inject_fault("write", 3, 1, errno.ENOSPC)

    monkeypatch.setattr(DiskEngine, "__init__", failing)
    model, expected = build(), build().state_dict()
    with pytest.raises(OSError, match="group"):
        unwall.shard(model, Plan(params="disk", optimizer="disk", compute_dtype=torch.float32, disk=tmp_path))
    monkeypatch.undo()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    unwall.shard(model, Plan(params="host", optimizer="host", compute_dtype=torch.float32))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_accumulation_takes_the_memory_of_shadows():
    """Speculation uses what is spare; when it is needed it gives it back."""

    def scenario(model, passes):
        optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
        for seed in range(3):
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()
        for seed in range(passes):
            backward(model, 10 + seed)
        optimizer.step()
        return unwall.stats(model)

    plan = {"params": "host", "optimizer": "host", "compute_dtype": torch.bfloat16}
    model = build()
    unwall.shard(model, Plan(**plan))
    needed = scenario(model, 2).tiers["host"].peak_bytes
    model = build()
    unwall.shard(model, Plan(**plan, host_bytes=needed))
    assert scenario(model, 1).speculated.committed > 0
    model = build()
    unwall.shard(model, Plan(**plan, host_bytes=needed))
    scenario(model, 2)


def test_frozen_parameters_get_no_moments_from_a_loaded_state():
    model = build()
    model[0].requires_grad_(False)
    unwall.shard(model, Plan(params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters())
    backward(model, 0)
    optimizer.step()
    before = unwall.stats(model).tiers["host"].live_bytes
    optimizer.load_state_dict(optimizer.state_dict())
    assert unwall.stats(model).tiers["host"].live_bytes == before


@pytest.mark.parametrize("tier", OFF_DEVICE)
def test_an_optimizer_in_a_cycle_is_collected_without_waiting_for_itself(tier, tmp_path):
    """Schedulers make cycles, so the collector runs finalisers wherever it likes: also on the thread that updates."""
    model = sharded(tier, tmp_path)
    for _ in range(3):
        optimizer = unwall.AdamW(model.parameters())
        optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
    gc.collect()
    live = unwall.stats(model).tiers[tier].live_bytes
    unwall.AdamW(model.parameters())
    gc.collect()
    assert unwall.stats(model).tiers[tier].live_bytes <= live


def test_two_optimizers_that_update_in_backward(tmp_path):
    """Each updates its own groups only, and neither takes the other's step for a second backward."""

    def scenario(model):
        one = unwall.AdamW(model[:3].parameters(), lr=1e-2, update_in_backward=True)
        two = unwall.AdamW(model[3:].parameters(), lr=1e-3, update_in_backward=True)
        for seed in range(3):
            backward(model, seed)
            one.step()
            two.step()
            one.zero_grad()
            two.zero_grad()
        return model.state_dict()

    same_on(OFF_DEVICE, scenario, tmp_path)
    model, whole = sharded("host", None), sharded("host", None)
    scenario(model)
    optimizer = unwall.AdamW(whole.parameters(), update_in_backward=True)
    backward(whole, 0)
    optimizer.step()
    live = [unwall.stats(one).tiers["host"].peak_bytes for one in (model, whole)]
    assert live[0] == live[1], "an optimizer keeps states for groups of the other"


def discard_local():
    """What ``no_sync`` left on a rank is discarded by ``zero_grad``, too."""
    rank, _ = rank_and_world()
    model = build()
    unwall.shard(model, Plan(compute_dtype=torch.float32, params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    with unwall.no_sync(model):
        model(torch.full((2, 64), 100.0)).square().mean().backward()
    optimizer.zero_grad()
    backward(model, rank)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    return max(float(entry["exp_avg"].abs().max()) for entry in state.values()) if state else 0.0


def test_zero_grad_discards_what_no_sync_kept(ranks):
    assert ranks(2).run(discard_local)[0] < 0.05


class Crossed(nn.Module):
    """Each rank uses the two halves in another order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        rank, _ = rank_and_world()
        first, second = (self.one, self.two) if rank == 0 else (self.two, self.one)
        return second(first(x))


def crossed(options):
    model = Crossed()
    unwall.shard(model, Plan(compute_dtype=torch.float32, params="host", optimizer="host"))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, **options)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
    return model.state_dict()


def both_ways():
    expected, got = crossed({}), crossed({"update_in_backward": True})
    return [name for name in expected if not torch.equal(expected[name], got[name])]


def test_update_in_backward_where_ranks_differ_in_order(ranks):
    assert ranks(2).run(both_ways) == [[], []]
