"""Lightning with the sharded strategy against the plain one: losses, weights, checkpoints."""

import logging
import os
import warnings

import pytest
import torch
from ranks import rank_and_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins.environments import LightningEnvironment  # noqa: E402

import unwall  # noqa: E402
from unwall.integrations.lightning import Strategy  # noqa: E402

LIMIT_S = 400.0


@pytest.fixture(scope="module", autouse=True)
def alone_again():
    """Lightning wants a process group in this process, too. It would look for a free port, which another process may take."""
    with pytest.MonkeyPatch.context() as monkey:
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkey.setenv(name, "")
            monkey.delenv(name)
        monkey.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        yield
    torch.distributed.destroy_process_group()


class Net(lightning.LightningModule):
    """As people write them; ``configure_model`` builds in the strategy's context."""

    def __init__(self, kind="adamw", late=False):
        super().__init__()
        self.kind, self.late, self.losses, self.checks = kind, late, [], []
        if not late:
            self.build()

    def build(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 4))

    def configure_model(self):
        if self.late and not hasattr(self, "net"):
            self.build()

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("checked", loss, sync_dist=True)

    def on_validation_epoch_end(self):
        self.checks.append(float(self.trainer.callback_metrics["checked"]))

    def configure_optimizers(self):
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 16, generator=generator), torch.randint(0, 4, (48,), generator=generator))
    return DataLoader(data, batch_size=4)


def fit(out, strategy, net=None, kind="adamw", late=False, resume=None, **options):
    """The module after training: losses, what validations gave, whole weights on rank 0."""
    rank, world = rank_and_world()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as monkey, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if world > 1:
            monkey.setenv("LOCAL_RANK", str(rank))
        made = strategy if isinstance(strategy, str) else Strategy(**strategy)
        options = {"max_epochs": 1, "gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "logger": False} | options
        trainer = lightning.Trainer(
            strategy=made,
            devices=world,
            accelerator="auto",
            default_root_dir=str(out),
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[LightningEnvironment()],
            **({"enable_checkpointing": False} | options),
        )
        net = net or Net(kind, late)
        trainer.fit(net, rows(), rows(), ckpt_path=resume and str(resume))
        state = {name: value.detach().clone() for name, value in net.state_dict().items()}
        return net, (net.losses, net.checks, state), trainer


def compared(out, *cases):
    return [fit(f"{out}/{number}", strategy, **options)[1] for number, (strategy, options) in enumerate(cases)]


def same(found, expected, **close):
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, list):
            ours, theirs = torch.tensor(ours), torch.tensor(theirs)
        torch.testing.assert_close(ours, theirs, **(close or {"rtol": 1e-4, "atol": 1e-6}))


class ByHand(Net):
    """Steps by hand, as Lightning's manual optimisation has it."""

    def __init__(self, clip):
        super().__init__()
        self.automatic_optimization, self.clip = False, clip

    def training_step(self, batch, _):
        optimizer = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clip == "lightning":
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        elif hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(0.05)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()
        self.losses.append(float(loss))


@pytest.mark.parametrize("clip", ["lightning", "unwall"])
def test_manual_optimisation_clips(tmp_path, clip):
    given = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    ours, plain = (
        fit(tmp_path / str(number), strategy, ByHand(clip), **given)[1][0] for number, strategy in enumerate(({}, "ddp"))
    )
    assert ours == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_trains_as_the_plain_strategy(ranks, tmp_path, world):
    by_value = {"kind": "sgd", "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    host = {"plan": unwall.Plan(params="host", optimizer="host")}
    cases = [("ddp", {}), ({}, {}), (host, {"late": True}), ("ddp", by_value), ({}, by_value)]
    expected, ours, on_host, values, our_values = ranks(world).run(compared, str(tmp_path), *cases, limit_s=LIMIT_S)[0]
    same(ours, expected)
    same(on_host, expected)
    same(our_values, values)


def test_bf16_as_the_plain_strategy(tmp_path):
    (plain, ours) = compared(tmp_path, ("ddp", {"precision": "bf16-mixed"}), ({}, {"precision": "bf16-mixed"}))
    same(ours, plain, rtol=0.05, atol=0.02)


def resumed(out, kind):
    """Two epochs, and the second one again from the checkpoint of the first."""
    saving = lightning.pytorch.callbacks.ModelCheckpoint
    keep = {"dirpath": f"{out}/kept", "filename": "{epoch}", "save_top_k": -1}
    options = {"enable_checkpointing": True, "max_epochs": 2}
    _, whole, fitted = fit(out, {"state_dict_type": kind}, callbacks=[saving(**keep)], **options)
    first = f"{out}/kept/epoch=0.ckpt"
    _, again, trainer = fit(out, {}, resume=first, callbacks=[saving(**keep | {"dirpath": f"{out}/again"})], **options)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setenv("LOCAL_RANK", str(rank_and_world()[0]))
        checked = trainer.validate(Net(), rows(), ckpt_path=f"{out}/kept/epoch=1.ckpt", verbose=False)
    return whole, again, os.path.isdir(first), (checked[0]["checked"], float(fitted.callback_metrics["checked"]))


@pytest.mark.parametrize(("world", "kind"), [(1, "sharded"), (1, "full"), pytest.param(2, "sharded", marks=pytest.mark.drill)])
def test_resumes_from_a_checkpoint(ranks, tmp_path, world, kind):
    whole, again, is_folder, checked = ranks(world).run(resumed, str(tmp_path), kind, limit_s=LIMIT_S)[0]
    half = len(whole[0]) // 2
    assert again[0] == whole[0][half:]
    torch.testing.assert_close(again[2], whole[2], rtol=0, atol=0)
    assert is_folder == (kind == "sharded")
    assert checked[0] == pytest.approx(checked[1], rel=1e-6)
    if kind == "full":
        plain = Net.load_from_checkpoint(tmp_path / "kept/epoch=1.ckpt")
        torch.testing.assert_close(dict(plain.state_dict()), whole[2], rtol=0, atol=0)


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match="precision='64-true'"):
        fit(tmp_path, {}, precision="64-true")
    with pytest.raises(ValueError, match="state_dict_type"):
        Strategy(state_dict_type="half")
