"""``Plan(sequence_tiles=N)``: token-wise modules in tiles, the values of the whole sequence."""

import pytest
import torch
from models_with_blocks import decoder, encoder_decoder, experts
from torch import nn

import unwall
from unwall.runtime.activation_room import ActivationRoom
from unwall.runtime.sequence_tiles import Tiles, candidates, is_token_wise
from unwall.schedule.activations import everywhere
from unwall.schedule.observed import Observed


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Mixes(Mlp):
    """Looks like an MLP, but its tokens see each other."""

    def forward(self, x):
        return self.down(self.act(self.up(x)))[..., :1] @ x[..., :1].mT @ x


class Counts(Mlp):
    """Each token's place matters."""

    def forward(self, x):
        return super().forward(x) + torch.arange(x.shape[-2]).view(-1, 1)


def test_which_modules_are_token_wise():
    names = {type(module).__name__ for module in candidates(decoder()[0])}
    assert names == {"LlamaMLP", "LlamaRMSNorm"}
    assert {type(module).__name__ for module in candidates(encoder_decoder()[0])} >= {"T5LayerNorm"}
    assert list(candidates(nn.Sequential(nn.Conv1d(2, 2, 3), nn.ReLU()))) == []
    assert list(candidates(nn.Linear(2, 2))) == []
    x = torch.randn(2, 9, 8)
    for kind, expected in ((Mlp, True), (Mixes, False), (Counts, False)):
        module = kind()
        assert next(iter(candidates(module))) is module
        assert is_token_wise(module, module.forward, x) is expected
        assert module.training


def trained(make, tiles, activations="keep", **options):
    torch.manual_seed(0)
    model, loss_of = make()
    model.eval()  # without dropout, which draws other numbers in tiles
    plan = unwall.Plan(
        params="host", optimizer="host", compute_dtype=torch.float32, activations=activations, sequence_tiles=tiles, **options
    )
    unwall.shard(model, plan)
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = loss_of()
        loss.backward()
        losses.append(loss.item())
        grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        optimizer.step()
    return losses, grads


@pytest.mark.parametrize("make", [decoder, encoder_decoder, experts])
def test_the_values_of_the_whole_sequence(make):
    losses, grads = trained(make, None)
    for activations in ("keep", "recompute"):
        found, tiled = trained(make, 3, activations)
        assert found == pytest.approx(losses, abs=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(tiled[name], grad, rtol=1e-4, atol=1e-6)


def test_only_a_tile_is_saved():
    """Of the inside of an MLP nothing is kept; what attends in disguise runs as it is."""
    kept = []
    for kind in (Mlp, Mixes):
        model = nn.Sequential(kind())
        plan = unwall.Plan(compute_dtype=torch.float32, activations="keep", sequence_tiles=4, params="device")
        unwall.shard(model, plan)
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.shape[-1] if tensor.dim() == 3 else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(2, 12, 8, requires_grad=True)).sum()
        kept.append(16 in sizes)
        loss.backward()
    assert kept == [False, True]


def test_a_count_that_is_none_is_refused():
    for tiles in (0, -1, True, 1.5):
        with pytest.raises(unwall.PlanError, match="sequence_tiles is a whole number"):
            unwall.Plan(sequence_tiles=tiles)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return x + self.mlp(x * 2)


@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_what_tiles_drop_does_not_count_as_held(choice, monkeypatch):
    """In passes that are measured, whatever was chosen for the block meanwhile."""
    monkeypatch.setattr(Observed, "best", lambda self, *_: everywhere(choice, self.blocks))
    found = {}
    for tiles in (None, 4):
        model = nn.ModuleDict({"blocks": nn.Sequential(Residual(), Residual())})
        model.forward = model.blocks.forward
        plan = unwall.Plan(
            compute_dtype=torch.float32, params="device", optimizer="device", device_bytes="1GiB", sequence_tiles=tiles
        )
        unwall.shard(model, plan)
        for _ in range(3):
            model(torch.randn(2, 12, 8, requires_grad=True)).sum().backward()
        decides = unwall.api.engine(model).activations
        assert set(decides.used) == {choice}
        found[tiles] = [block.kept_bytes for block in decides.blocks]
    given = 2 * 12 * 8 * 4
    assert found[4] == [given] * 2  # the MLP's input, of which the tiles are parts
    assert min(found[None]) >= given + 2 * 12 * 16 * 4  # and what is inside


@pytest.mark.parametrize("short", ["blocks", "loss"])
def test_auto_runs_in_tiles_where_a_block_does_not_fit_and_not_for_a_loss(short, monkeypatch):
    """What a loss needs may be a guess, and tiles of the blocks would not make it smaller."""
    most = 1 << 40
    monkeypatch.setattr(ActivationRoom, "beyond_bytes", lambda *_: (most, 0) if short == "blocks" else (0, most))
    model = nn.ModuleDict({"blocks": nn.Sequential(Residual(), Residual())})
    model.forward = model.blocks.forward
    unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, params="host", optimizer="host", device_bytes="1GiB"))
    decides = unwall.api.engine(model).activations
    decides.tiles = Tiles(model)  # as on an accelerator
    for _ in range(3):
        model(torch.randn(2, 12, 8, requires_grad=True)).sum().backward()
    assert (decides.tiles.count > 1) is (short == "blocks")
