"""Weights that are never whole on the device: read, and their gradients reduced, tile by tile, with the values of plain torch."""

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

import unwall
from unwall.plans import Plan, PlanError

PLACEMENTS = {
    "device": {"params": "device", "optimizer": "device"},
    "host": {"params": "host", "optimizer": "host"},
    "disk": {"params": "disk", "grads": "disk", "optimizer": "disk"},
}
OPTIONS = {"lr": 1e-2, "eps": 1e-2}
"""With a large eps AdamW does not blow up the last bits of small gradients."""


class Net(nn.Module):
    """An embedding tied with the head, biases, a padding index, a module that is called twice, and checkpoints."""

    def __init__(self, tied=True, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(101, 32, padding_idx=3)
        self.up = nn.Linear(32, 72)
        self.again = nn.Linear(72, 72)
        self.norm = nn.LayerNorm(72)
        self.down = nn.Linear(72, 32, bias=False)
        self.head = nn.Linear(32, 101, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def body(self, hidden):
        return self.down(self.norm(self.again(self.again(torch.tanh(self.up(hidden))))))

    def forward(self, ids):
        hidden = self.embed(ids)
        found = checkpoint(self.body, hidden, use_reentrant=False) if self.recompute else self.body(hidden)
        return self.head(hidden + found)


def batch(step):
    return torch.randint(0, 101, (3, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    ids = batch(step)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def train(model, optimizer, passes=1, clip=False, steps=3):
    losses = []
    for step in range(steps):
        for index in range(passes):
            loss = loss_of(model, 10 * step + index)
            loss.backward()
            losses.append(loss.item())
        if clip and isinstance(optimizer, torch.optim.Optimizer):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif clip:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain(tied=True, **how):
    model = Net(tied)
    losses = train(model, torch.optim.AdamW(model.parameters(), **OPTIONS), **how)
    return losses, model.state_dict()


def tiled(stage=3, wrapped=False, recompute=False, tied=True, fields=None, **how):
    model = Net(tied, recompute)
    unwall.shard(model, Plan(stage=stage, compute_dtype=torch.float32, **{"tiles": 5, **(fields or {})}))
    params = model.parameters()
    optimizer = unwall.wrap(torch.optim.AdamW(params, **OPTIONS)) if wrapped else unwall.AdamW(params, **OPTIONS)
    losses = train(model, optimizer, **how)
    places = {name: len(unwall.api.engine(model).places[id(param)]) for name, param in model.named_parameters()}
    return losses, model.state_dict(), places


def check(found, expected):
    losses, values, places = found
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-6, atol=1e-6)
    assert list(values) == list(expected[1])
    for name, value in expected[1].items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6)
    assert places["embed.weight"] == places["up.weight"] == 5
    assert places["up.bias"] == places["norm.weight"] == 1


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("how", [{"clip": True}, {"passes": 2, "wrapped": True, "recompute": True}])
def test_tiles_train_as_the_whole_does(placement, how, tmp_path):
    fields = {**PLACEMENTS[placement], "disk": str(tmp_path), "passes": how.get("passes", 1)}
    expected = plain(passes=how.get("passes", 1), clip=how.get("clip", False))
    check(tiled(fields=fields, **how), expected)


@pytest.mark.parametrize(("stage", "placement"), [(0, "device"), (1, "host"), (2, "device"), (3, "device"), (3, "host")])
def test_tiles_over_two_ranks(stage, placement, ranks, tmp_path):
    fields = {**PLACEMENTS[placement], "disk": str(tmp_path)}
    expected = plain(clip=True)
    results = ranks(2).run(tiled, stage, recompute=stage == 3, fields=fields, clip=True)
    check(results[0], expected)
    assert results[1][0] == results[0][0]


class Whole(nn.Module):
    """Of whole numbers, so small that no order of summation loses anything: what is rounded, is rounded by the dtype alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(23, 8, padding_idx=2), nn.Linear(8, 23, bias=False)
        self.up, self.again, self.down = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 8, bias=False)
        self.head.weight = self.embed.weight
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape, generator=source))
            self.embed.weight.mul_(5)

    def forward(self, ids):
        return self.head(self.down(self.again(self.again(self.up(self.embed(ids))))))


def gradients_of_whole_numbers(fields):
    model = Whole()
    params = unwall.shard(model, Plan(passes=2, **fields)).parameters()
    ids = torch.arange(20).view(2, 10) * 7 % 23
    for signs in (1, -3):  # two passes
        logits = model(ids)
        (logits.float() * ((torch.arange(23) % 3 - 1) * signs)).sum().backward()
    return logits.detach(), [param.grad.clone() for param in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_round_where_the_whole_does_and_nowhere_else(dtype, tmp_path):
    """A tied weight, a bias, a layer that is called twice, and several passes: the same bits where sums are exact."""
    logits, grads = gradients_of_whole_numbers({"compute_dtype": dtype, **PLACEMENTS["device"]})
    largest = max(grad.abs().max().item() for grad in grads)
    assert 2**12 < largest < 2**22
    for placement in PLACEMENTS.values():
        fields = {"compute_dtype": dtype, "tiles": 3, "disk": str(tmp_path), **placement}
        found, parts = gradients_of_whole_numbers(fields)
        assert torch.equal(found, logits)
        for part, grad in zip(parts, grads, strict=True):
            assert torch.equal(part, grad)


def test_a_layer_of_eight_times_the_device_budget_trains_within_it():
    width = 1024  # 4 MiB

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def run(model, optimizer):
        torch.manual_seed(1)
        for _ in range(3):
            inputs = torch.randn(8, width, requires_grad=True)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return inputs.grad

    expected = build()
    grad = run(expected, torch.optim.AdamW(expected.parameters(), **OPTIONS))
    budget = width * width * 4 // 8
    model = unwall.shard(build(), Plan(compute_dtype=torch.float32, device_bytes=budget))
    found = run(model, unwall.AdamW(model.parameters(), **OPTIONS))
    torch.testing.assert_close(found, grad, rtol=1e-6, atol=1e-6)
    stats = unwall.stats(model)
    assert stats.tiers["device"].peak_bytes <= budget
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-6, atol=1e-6)


def test_without_gradients():
    model = Net().eval()
    with torch.no_grad():
        expected, rows = model(batch(0)), model.embed(batch(0))
    unwall.shard(model, Plan(compute_dtype=torch.float32, tiles=4, **PLACEMENTS["host"]))
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0)), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(model.embed(batch(0)), rows)
    with torch.inference_mode():
        torch.testing.assert_close(model(batch(0)), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(model.embed(batch(0)), rows)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_autocast_and_narrow_dtypes(compute):
    def grads(fields):
        model = unwall.shard(Net(), Plan(compute_dtype=compute, **fields))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute is torch.float32):
            loss = loss_of(model, 0)
        loss.backward()
        return loss.item(), {name: param.grad.clone().float() for name, param in model.named_parameters()}

    loss, whole = grads({})
    again, parts = grads({"tiles": 4})
    assert again == pytest.approx(loss, rel=1e-3)
    for name, grad in whole.items():
        torch.testing.assert_close(parts[name], grad, rtol=2e-2, atol=2e-3)


def test_what_a_backward_was_not_asked_for_is_left_alone():
    model = unwall.shard(Net(tied=False), Plan(compute_dtype=torch.float32, tiles=4))
    hidden = model.embed(batch(0)).detach().requires_grad_()
    (grad,) = torch.autograd.grad(model.body(hidden).sum(), hidden)
    expected = Net(tied=False)
    (whole,) = torch.autograd.grad(expected.body(hidden).sum(), hidden)
    torch.testing.assert_close(grad, whole, rtol=1e-5, atol=1e-6)
    assert model.up.weight.grad is None
    with pytest.raises(RuntimeError, match=r"cannot give the gradient of up\.weight: it is read in tiles"):
        torch.autograd.grad(model.body(hidden).sum(), [model.up.weight])
    loss_of(model, 0).backward()
    assert model.up.weight.grad is not None


def test_frozen_tiles_pass_gradients_on():
    model, expected = Net(tied=False), Net(tied=False)
    for net in (model, expected):
        net.again.requires_grad_(False)
        net.embed.requires_grad_(False)
    unwall.shard(model, Plan(compute_dtype=torch.float32, tiles=4, **PLACEMENTS["host"]))
    loss_of(model, 0).backward()
    loss_of(expected, 0).backward()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(param.grad.clone(), other.grad, rtol=1e-5, atol=1e-6)


def test_ids_outside_of_the_embedding_raise():
    model = unwall.shard(Net(), Plan(compute_dtype=torch.float32, tiles=4))
    with pytest.raises(IndexError, match="101 rows"):
        model(torch.tensor([[101]]))


def test_what_needs_the_whole_weight_says_so():
    model = unwall.shard(Net(), Plan(compute_dtype=torch.float32, tiles=4))
    model.up.register_forward_hook(lambda module, *_: module.weight.norm())
    with pytest.raises(RuntimeError, match=r"up\.weight lies in 4 slots and is never whole on the device, but norm needs it"):
        model(batch(0))
    model = unwall.shard(Net(), Plan(compute_dtype=torch.float32, tiles=4))
    model.up.weight.register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=r"up\.weight is read in tiles.*a hook that was registered on it"):
        model(batch(0))


def test_tiles_by_parameter():
    wanted = {"up.weight": 3, "down.weight": 1, "up.bias": None}
    model = unwall.shard(Net(), Plan(compute_dtype=torch.float32, tiles=lambda name, _: wanted.get(name)))
    places = {name: len(unwall.api.engine(model).places[id(param)]) for name, param in model.named_parameters()}
    assert {name: count for name, count in places.items() if count > 1} == {"up.weight": 3}
    with pytest.raises(PlanError, match=r"norm\.weight cannot be read in tiles \(got 2 for it\)"):
        unwall.shard(Net(), Plan(tiles=lambda name, _: 2 if name == "norm.weight" else None))
    with pytest.raises(PlanError, match="tiles gives a whole number"):
        unwall.shard(Net(), Plan(tiles=lambda *_: 0))
    for wrong in (0, -1, True, 1.5, "4"):
        with pytest.raises(PlanError, match="tiles is a whole number"):
            Plan(tiles=wrong)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(512, 512))

    def forward(self, inputs):
        return inputs @ torch.linalg.qr(self.matrix)[0]


def test_a_huge_operator_that_knows_no_tiles_is_refused_by_name():
    with pytest.raises(PlanError, match=r"device_bytes=2097152\).*cannot be read in tiles is matrix \(1\.0 MiB\)") as refusal:
        unwall.shard(Odd(), Plan(compute_dtype=torch.float32, device_bytes=1 << 20))
    assert refusal.value.lack[1] > 1 << 20


def test_a_model_in_tiles_is_saved_loaded_and_exported(tmp_path):
    def start(tiles):
        model = unwall.shard(Net(), Plan(compute_dtype=torch.float32, tiles=tiles, **PLACEMENTS["host"]))
        return model, unwall.AdamW(model.parameters(), **OPTIONS)

    model, optimizer = start(5)
    train(model, optimizer)
    unwall.save(tmp_path / "checkpoint", model, optimizer)
    unwall.export_weights(model, tmp_path / "weights")
    with unwall.full_params(model):
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
    expected = train(model, optimizer, steps=1)
    for tiles in (1, 3):
        again, resumed = start(tiles)
        unwall.load(tmp_path / "checkpoint", again, resumed)
        torch.testing.assert_close(torch.tensor(train(again, resumed, steps=1)), torch.tensor(expected), rtol=1e-6, atol=1e-6)
        loaded, _ = start(tiles)
        unwall.load_weights(loaded, tmp_path / "weights")
        with unwall.full_params(loaded):
            for name, param in loaded.named_parameters():
                assert torch.equal(param, values[name]), name


def experts(kind, implementation):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2}
    if kind == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape))
    else:  # stacked the other way round
        shape |= {"head_dim": 8, "layer_types": ["full_attention"]}
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**shape))
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=0.1)
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize(("kind", "tiles"), [("mixtral", 3), ("mixtral", 12), ("gpt_oss", 12)])
def test_stacked_experts_in_tiles(kind, tiles, implementation):
    """With 12 tiles each of the 6 experts lies in two. The few tokens choose some of the experts: the others get zeros."""
    ids = torch.arange(5).view(1, 5)
    expected = experts(kind, implementation)
    loss = expected(input_ids=ids, labels=ids).loss
    loss.backward()
    model = experts(kind, implementation)
    unwall.shard(model, Plan(compute_dtype=torch.float32, tiles=tiles, **PLACEMENTS["host"]))
    found = model(input_ids=ids, labels=ids).loss
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    counts = set()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.grad.clone(), other.grad, rtol=1e-5, atol=1e-6, msg=name)
        if param.dim() == 3:
            counts.add(len(unwall.api.engine(model).places[id(param)]))
    assert counts == {tiles}
    optimizer = unwall.AdamW(model.parameters(), **OPTIONS)
    torch.optim.AdamW(expected.parameters(), **OPTIONS).step()
    optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_adapters_on_frozen_tiles():
    peft = pytest.importorskip("peft")

    def build(sharded):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
        )
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
        if sharded:
            unwall.shard(model, Plan(compute_dtype=torch.float32, tiles=4, **PLACEMENTS["host"]))
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = (unwall.AdamW if sharded else torch.optim.AdamW)(params, **OPTIONS)
        losses = []
        for _ in range(3):
            loss = model(input_ids=batch(0) % 64, labels=batch(1) % 64).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert build(True) == pytest.approx(build(False), rel=1e-5)


def test_the_loss_without_logits_reads_a_head_in_tiles():
    class Chunked(Net):
        def forward(self, ids):
            hidden = self.embed(ids)
            options = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": 7, "chunk_tokens": 10}
            return unwall.nn.linear_cross_entropy(hidden + self.body(hidden), self.head.weight, ids, **options)

    expected, model = Chunked(), Chunked()
    loss = expected(batch(0))
    loss.backward()
    unwall.shard(model, Plan(compute_dtype=torch.float32, tiles=5, **PLACEMENTS["host"]))
    found = model(batch(0))
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    for (name, param), other in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(param.grad.clone(), other[1].grad, rtol=1e-5, atol=1e-6, msg=name)


class Scored(nn.Module):
    def __init__(self, chunk_tokens):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.chunk_tokens = nn.Linear(16, 16), nn.Linear(16, 64), chunk_tokens

    def forward(self, x, labels):
        hidden = torch.tanh(self.body(x))
        return unwall.nn.linear_cross_entropy(hidden, self.head.weight, labels, self.head.bias, chunk_tokens=self.chunk_tokens)


def scored(chunk_tokens, tiles):
    model = unwall.shard(
        Scored(chunk_tokens), Plan(tiles=tiles, activations="keep", device_bytes="20KiB", **PLACEMENTS["host"])
    )
    source = torch.Generator().manual_seed(1)
    x, labels = torch.randn(1024, 16, generator=source), torch.randint(0, 64, (1024,), generator=source)
    unwall.stats(model).reset()
    loss = model(x, labels)
    loss.backward()
    read = unwall.stats(model).links["host>device"].moved_bytes
    return loss.item(), read, {name: param.grad.clone().float() for name, param in model.named_parameters()}


def test_the_loss_adds_up_a_tiles_gradient_in_fp32_and_reads_it_once():
    """bf16, 128 chunks of tokens: as for a head in one piece."""
    loss, _, whole = scored(8, 1)
    found, read, grads = scored(8, 4)
    assert found == pytest.approx(loss, rel=1e-6)
    assert read == scored(1024, 4)[1]
    for name, grad in whole.items():
        assert (grads[name] - grad).norm() < 4e-3 * grad.norm(), name


def test_labels_outside_of_a_tiled_head_raise():
    model = unwall.shard(Scored(8), Plan(tiles=4))
    for label in (64, -1):
        with pytest.raises(IndexError, match="a head of 64 rows was given labels outside"):
            model(torch.randn(1, 16), torch.tensor([label]))


class Hidden(Scored):
    def forward(self, x):
        return torch.tanh(self.body(x))


@pytest.mark.parametrize("tiles", [1, 4])
def test_the_loss_outside_of_the_forward_reads_the_head_in_the_dtype_of_the_tokens(tiles):
    source = torch.Generator().manual_seed(1)
    x, labels = torch.randn(16, 16, generator=source), torch.randint(0, 64, (16,), generator=source)
    inside, outside = (unwall.shard(kind(8), Plan(tiles=tiles, **PLACEMENTS["host"])) for kind in (Scored, Hidden))
    loss = inside(x, labels)
    hidden, head = outside(x), outside.head
    found = unwall.nn.linear_cross_entropy(hidden, head.weight, labels, head.bias, chunk_tokens=8)
    assert hidden.dtype is torch.bfloat16
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    loss.backward()
    found.backward()
    for param, other in zip(outside.parameters(), inside.parameters(), strict=True):
        torch.testing.assert_close(param.grad.clone(), other.grad.clone(), rtol=2e-2, atol=1e-3)
