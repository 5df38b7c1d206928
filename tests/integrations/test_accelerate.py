"""``Accelerator`` with a sharded model against the plain one, and plain Accelerate that is given a sharded model."""

import pytest
import torch
from ranks import rank_and_world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

import unwall  # noqa: E402
from unwall.integrations.accelerate import Accelerator  # noqa: E402

LIMIT_S = 400.0


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def rows():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 16, generator=generator), torch.randint(0, 4, (48,), generator=generator))
    return DataLoader(data, batch_size=4)


def fresh(monkey):
    rank, world = rank_and_world()
    if world > 1:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
            monkey.setenv(name, str(value))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(kind, make, epochs=1, clip="norm", saved=None, loaded=None, shard_first=False, **options):
    """Losses and norms of a loop as Accelerate's own pages write it, and the whole weights at the end."""
    with pytest.MonkeyPatch.context() as monkey:
        fresh(monkey)
        accelerator = kind(gradient_accumulation_steps=2, **options)
        model = network()
        if shard_first:
            unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, passes=2))
        optimizer = (lambda params: unwall.wrap(make(params)) if shard_first else make(params))(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, rows(), scheduler)
        if loaded is not None:
            accelerator.load_state(loaded)
        seen = []
        for epoch in range(epochs):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        if clip == "norm":
                            seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
                        else:
                            accelerator.clip_grad_value_(model.parameters(), 0.02)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                seen.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
            if saved is not None and epoch == 0:
                accelerator.save_state(saved)
        whole = accelerator.get_state_dict(model)
        assert accelerator.unwrap_model(model) is not None
        return seen, {name: value.cpu() for name, value in whole.items()}


def compared(*cases):
    return [train(kind, make, **options) for kind, make, options in cases]


def same(found, expected):
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_trains_as_the_plain_accelerator(ranks, world):
    host = {"plan": unwall.Plan(params="host", optimizer="host")}
    cases = [(accelerate.Accelerator, adamw, {}), (Accelerator, adamw, {}), (Accelerator, adamw, host)]
    cases += [(kind, sgd, {"clip": "value"}) for kind in (accelerate.Accelerator, Accelerator)]
    plain, ours, on_host, plain_sgd, our_sgd = ranks(world).run(compared, *cases, limit_s=LIMIT_S)[0]
    same(ours, plain)
    same(on_host, plain)
    same(our_sgd, plain_sgd)


@pytest.mark.parametrize("world", [1, 2])
def test_plain_accelerate_leaves_a_sharded_model_alone(ranks, world):
    cases = [(accelerate.Accelerator, sgd, {}), (accelerate.Accelerator, sgd, {"shard_first": True})]
    plain, ours = ranks(world).run(compared, *cases, limit_s=LIMIT_S)[0]
    same(ours, plain)


def test_goes_on_from_a_saved_state(tmp_path):
    whole, weights = train(Accelerator, adamw, epochs=2, saved=str(tmp_path))
    again, resumed = train(Accelerator, adamw, loaded=str(tmp_path), plan=unwall.Plan(optimizer="host"))
    assert again == whole[len(whole) // 2 :]
    torch.testing.assert_close(resumed, weights, rtol=0, atol=0)


def test_mixed_precision_is_the_compute_dtype():
    with pytest.MonkeyPatch.context() as monkey:
        fresh(monkey)
        model = Accelerator(mixed_precision="bf16").prepare(network())
    assert model(torch.randn(2, 16)).dtype is torch.bfloat16


def test_what_cannot_work_is_refused():
    with pytest.MonkeyPatch.context() as monkey:
        fresh(monkey)
        with pytest.raises(ValueError, match="say the same in both"):
            Accelerator(mixed_precision="bf16", plan=unwall.Plan(compute_dtype=torch.float16))
        with pytest.raises(ValueError, match="leave fsdp_plugin out"):
            Accelerator(fsdp_plugin=accelerate.FullyShardedDataParallelPlugin())
        fresh(monkey)
        accelerator, model = Accelerator(), network()
        with pytest.raises(ValueError, match="element-wise"):
            accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
