"""A training that goes on from a checkpoint: on any ranks, under any plan, with the bits it had."""

import random

import numpy as np
import pytest
import torch
from checkpoint_tools import TIERS, Setup, amsgrad, begin, differing, draw, everything, momentum, run, step
from models import NormNet, TiedNet
from ranks import rank_and_world
from torch import nn

import unwall
from unwall.plans import Plan

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16

SAME = [
    (1, "device", {"dtype": FP32}, None),
    (1, "host", {"dtype": BF16}, None),
    (1, "disk", {"dtype": BF16, "clip": 0.1}, None),
    (1, "mixed", {"dtype": FP16}, None),
    (1, "disk", {"dtype": BF16, "frozen": False}, momentum),
    (2, "device", {"dtype": BF16, "stage": 1}, None),
    (2, "host", {"dtype": BF16, "stage": 3}, None),
    (2, "disk", {"dtype": FP32, "stage": 0}, None),
    (2, "host", {"dtype": FP32, "stage": 2, "frozen": False}, amsgrad),
]


@pytest.mark.parametrize(("world", "tiers", "setup", "optimizer"), SAME)
def test_the_same_plan_goes_on_with_the_same_bits(ranks, tmp_path, world, tiers, setup, optimizer):
    pool = ranks(world)
    expected, _ = pool.run(run, tmp_path, tiers, 0, 5, optimizer=optimizer, **setup)[0]
    pool.run(run, tmp_path, tiers, 0, 3, save=tmp_path / "saved", optimizer=optimizer, **setup)
    results = pool.run(run, tmp_path, tiers, 3, 5, load=tmp_path / "saved", optimizer=optimizer, **setup)
    assert differing(expected, results[0][0]) == []
    assert [extra for _, extra in results] == [{"step": 3}] * world


ELASTIC = [
    # ranks, tiers, stage and dtype at the save, then at the load
    ((1, "device", 3, BF16), (2, "host", 3, BF16)),
    ((2, "device", 0, FP32), (3, "disk", 2, BF16)),
    ((3, "host", 1, FP16), (1, "device", 3, FP32)),
    ((4, "disk", 3, BF16), (2, "device", 0, FP16)),
    ((2, "mixed", 2, BF16), (4, "host", 1, FP32)),
    ((3, "disk", 3, FP32), (4, "device", 3, BF16)),
]


@pytest.mark.parametrize(("saved", "loaded"), ELASTIC)
def test_other_ranks_and_another_plan_find_the_same_values(ranks, tmp_path, saved, loaded):
    world, tiers, stage, dtype = saved
    expected, _ = ranks(world).run(run, tmp_path, tiers, 0, 2, save=tmp_path / "saved", stage=stage, dtype=dtype)[0]
    world, tiers, stage, dtype = loaded
    found, extra = ranks(world).run(run, tmp_path, tiers, 2, 2, load=tmp_path / "saved", stage=stage, dtype=dtype)[0]
    assert differing(expected, found) == []
    assert extra == {"step": 2}


def test_a_wrapped_optimizer_moves_to_other_ranks(ranks, tmp_path):
    options = {"optimizer": amsgrad, "frozen": False}
    expected, _ = ranks(2).run(run, tmp_path, "host", 0, 2, save=tmp_path / "saved", **options)[0]
    found, _ = ranks(3).run(run, tmp_path, "disk", 2, 2, load=tmp_path / "saved", **options)[0]
    assert differing(expected, found) == []


def generators(path, load):
    """What each generator gives next, before and after a checkpoint."""
    rank, _ = rank_and_world()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model = nn.Linear(4, 4)
    unwall.shard(model)
    if load:
        unwall.load(path, model)
        return draw()
    draw()
    unwall.save(path, model)
    return draw()


def test_random_numbers_go_on_where_they_were(ranks, tmp_path):
    expected = ranks(2).run(generators, tmp_path, False)
    assert ranks(2).run(generators, tmp_path, True) == expected
    assert expected[0] != expected[1]
    assert len(ranks(1).run(generators, tmp_path, True)) == 1  # another number of ranks: they stay as they are


def normed(path, load):
    """The buffers of a model with running statistics, which are each rank's own."""
    rank, _ = rank_and_world()
    torch.manual_seed(0)
    model = NormNet()
    unwall.shard(model, Plan(compute_dtype=FP32))
    if load:
        extra = unwall.load(path, model)
    else:
        torch.manual_seed(rank)
        model(torch.randn(8, 16))
        extra = {"position": 10 * rank, "rows": torch.full((2,), float(rank)), "shared": [torch.ones(3), (1, 2.5)]}
        unwall.save(path, model, extra=extra)
    return {name: value.clone() for name, value in model.named_buffers()}, extra


def test_buffers_and_extra_are_those_of_each_rank(ranks, tmp_path):
    saved, loaded = (ranks(2).run(normed, tmp_path, load) for load in (False, True))
    for (buffers, extra), (found, got) in zip(saved, loaded, strict=True):
        assert differing(buffers, found) == []
        assert (got["position"], got["rows"].tolist()) == (extra["position"], extra["rows"].tolist())
        assert got["shared"][1] == (1, 2.5)
    assert differing(saved[0][0], saved[1][0]) != []
    for buffers, extra in ranks(3).run(normed, tmp_path, True):  # other ranks: everyone has rank 0's
        assert differing(saved[0][0], buffers) == []
        assert extra["position"] == 0


def linear(**plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    unwall.shard(model, Plan(**plan))
    return model


def test_checkpoints_are_numbered_and_the_newest_is_loaded(tmp_path):
    model = linear()
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        unwall.load(tmp_path / "none", model)
    paths = [unwall.save(tmp_path, model, extra=number) for number in range(3)]
    assert [path.name for path in paths] == ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003"]
    assert unwall.load(tmp_path, model) == 2
    assert unwall.load(paths[0], model) == 0
    assert unwall.save(tmp_path, model, extra=3, keep=2).name == "checkpoint-000004"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-000003", "checkpoint-000004"]
    (tmp_path / "checkpoint-000004" / "manifest.json").unlink()  # as if its save had been killed
    assert unwall.load(tmp_path, model) == 2
    unwall.save(tmp_path, model, extra=5)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-000003", "checkpoint-000004"]
    assert unwall.load(tmp_path, model) == 5
    with pytest.raises(ValueError, match="is a checkpoint: save into the directory that holds it"):
        unwall.save(tmp_path / "checkpoint-000003", model)
    with pytest.raises(ValueError, match="keep is how many"):
        unwall.save(tmp_path, model, keep=0)


def test_options_scheduler_and_loss_scale_come_back(tmp_path):
    def training():
        model = linear()
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
        optimizer = unwall.AdamW(groups, lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])

    model, optimizer, scheduler = training()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.scaler.scale = 128.0
    unwall.save(tmp_path, model, optimizer, extra={"scheduler": scheduler.state_dict()})
    other, loaded, follows = training()
    follows.load_state_dict(unwall.load(tmp_path, other, loaded)["scheduler"])
    assert [group["lr"] for group in loaded.param_groups] == pytest.approx([0.05, 0.01])
    assert loaded.scaler.scale == 128.0
    for trained in (scheduler, follows):
        trained.step()
        trained.step()
    assert follows.get_last_lr() == scheduler.get_last_lr()


def test_parameters_without_a_gradient_so_far_have_no_states(tmp_path):
    model = linear()
    optimizer = unwall.AdamW(model.parameters())
    model[0](torch.randn(2, 8)).sum().backward()
    optimizer.step()
    unwall.save(tmp_path, model, optimizer)
    other = linear()
    loaded = unwall.AdamW(other.parameters())
    other(torch.randn(2, 8)).sum().backward()
    loaded.step()
    unwall.load(tmp_path, other, loaded)
    assert sorted(loaded.state_dict()["state"]) == [0, 1]
    assert differing(everything(model, optimizer), everything(other, loaded)) == []


def test_weights_alone_can_be_loaded(tmp_path):
    model, optimizer = begin(Setup(blocks=2), TIERS["host"], tmp_path)
    step(model, optimizer, Setup(), 0)
    unwall.save(tmp_path, model, optimizer)
    other, fresh = begin(Setup(blocks=2), TIERS["device"], tmp_path)
    unwall.load(tmp_path, other)
    assert differing(dict(model.state_dict()), dict(other.state_dict())) == []
    unwall.save(tmp_path, other)
    with pytest.raises(unwall.CheckpointError, match="has no optimizer in it"):
        unwall.load(tmp_path, other, fresh)


def test_tied_parameters_are_stored_once(tmp_path):
    torch.manual_seed(0)
    model = TiedNet()
    unwall.shard(model)
    path = unwall.save(tmp_path, model)
    text = (path / "manifest.json").read_text()
    assert text.count('"name":"embed.weight"') == 1
    assert '"aliases":["head.weight"]' in text
    other = TiedNet()
    unwall.shard(other)
    unwall.load(tmp_path, other)
    assert differing(dict(model.state_dict()), dict(other.state_dict())) == []


class Capped(torch.optim.SGD):
    """With a limit among its options that limits nothing."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.defaults["cap"] = self.param_groups[0]["cap"] = float("inf")


def test_an_option_may_be_infinite(tmp_path):
    model = unwall.shard(nn.Linear(4, 4))
    optimizer = unwall.wrap(Capped(model.parameters(), lr=0.1))
    unwall.save(tmp_path, model, optimizer)
    optimizer.param_groups[0]["cap"] = 1.0
    unwall.load(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["cap"] == float("inf")


class Quantised(nn.Module):
    """A frozen weight of one byte per element beside a trained one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(4, 8).to(torch.float8_e4m3fn), requires_grad=False)
        self.trained = nn.Linear(8, 4)


def test_frozen_parameters_of_one_byte_move_to_another_tier(tmp_path):
    torch.manual_seed(0)
    model = unwall.shard(Quantised(), Plan(params="host", optimizer="host"))
    unwall.save(tmp_path, model, unwall.AdamW(model.trained.parameters()))
    for fields in ({"params": "disk", "optimizer": "disk", "disk": tmp_path}, {}):
        other = unwall.shard(Quantised(), Plan(**fields))
        unwall.load(tmp_path, other, unwall.AdamW(other.trained.parameters()))
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name].float(), value.float())


def test_the_files_are_readable_by_safetensors(tmp_path):
    from safetensors.torch import load_file

    model = linear(compute_dtype=BF16)
    path = unwall.save(tmp_path, model)
    found = load_file(path / "rank-00000.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(found[f"param/{name}"], value)
        assert found[f"param/{name}"].dtype == FP32


def test_what_cannot_be_saved_is_refused(tmp_path):
    model = linear()
    optimizer = unwall.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match="not sharded"):
        unwall.save(tmp_path, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="part of a sharded model"):
        unwall.save(tmp_path, model[0])
    with pytest.raises(TypeError, match=r"extra\.loader is a object"):
        unwall.save(tmp_path, model, extra={"loader": object()})
    with pytest.raises(TypeError, match=r"extra\.graph is a sparse_coo tensor"):
        unwall.save(tmp_path, model, extra={"graph": torch.ones(3).to_sparse()})
    loop = {}
    loop["again"] = [loop]
    with pytest.raises(TypeError, match=r"extra\.again\[0\]\.again.* is nested more than 100 deep"):
        unwall.save(tmp_path, model, extra=loop)
    with pytest.raises(TypeError, match=r"extra\.long is a longdouble"):
        unwall.save(tmp_path, model, extra={"long": np.longdouble(1)})
    with pytest.raises(TypeError, match="not an optimizer of a sharded model"):
        unwall.save(tmp_path, model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1))
    with unwall.full_params(model), pytest.raises(RuntimeError, match="inside unwall"):
        unwall.save(tmp_path, model)
    assert list(tmp_path.glob("checkpoint-*")) == []
    unwall.save(tmp_path, model, optimizer)
