"""What comes into a model after ``shard`` (adapters, resized embeddings, other modules), and what may not come around it."""

import pytest
import torch
import transformers
from models import TiedNet, token_loss, tokens
from offload import Setup, named_budget, over_budget, smallest
from offload import build as blocks
from offload import step as take_step
from ranks import rank_and_world
from reference import assert_close, assert_equal, average_gradients, seeded, whole_state
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import unwall
from unwall.plans import Plan

TIERS = {"device": {}, "host": {"params": "host", "optimizer": "host"}, "disk": {"params": "disk", "optimizer": "disk"}}
LR = 1e-2


class Adapted(nn.Module):
    """A linear layer, frozen, and a low-rank addition, as adapters are put into a model."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 3, bias=False), nn.Linear(3, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def adapt(model, seed=1):
    """Half of the layers get an adapter; everything else is frozen."""
    for param in model.parameters():
        param.requires_grad_(False)
    torch.manual_seed(seed)
    for index in range(0, 6, 2):
        model.layers[index] = Adapted(model.layers[index])
    return [param for param in model.parameters() if param.requires_grad]


def batch_of(step, rank):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_adapters(world):
    replicas = [seeded(Chain) for _ in range(world)]
    params = [adapt(model) for model in replicas]
    optimizers = [torch.optim.AdamW(owned, lr=LR) for owned in params]
    for step in range(3):
        for rank, model in enumerate(replicas):
            model(batch_of(step, rank)).square().mean().backward()
        average_gradients(replicas)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return replicas[0].state_dict()


def unwall_adapters(fields, folder, early):
    """``early``: the model has run before the adapters come. Each rank draws other adapters: rank 0's count."""
    rank, _ = rank_and_world()
    model = seeded(Chain)
    unwall.shard(model, Plan(**fields, disk=folder if "disk" in fields.values() else None))
    if early:
        model(batch_of(0, rank)).sum().backward()
        model.zero_grad()
    optimizer = unwall.AdamW(adapt(model, seed=1 + rank), lr=LR)
    for step in range(3):
        model(batch_of(step, rank).to(torch.float32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("tier", TIERS)
def test_adapters_after_shard_train_as_in_plain_pytorch(ranks, tmp_path, tier, world):
    fields = {**TIERS[tier], "compute_dtype": torch.float32}
    got = ranks(world).run(unwall_adapters, fields, tmp_path, tier == "host")[0]
    assert_close(plain_adapters(world), got)


def before_or_after(fields, after):
    model = seeded(Chain)
    if not after:
        owned = adapt(model)
    unwall.shard(model, Plan(**fields))
    if after:
        owned = adapt(model)
    optimizer = unwall.AdamW(owned, lr=LR)
    for step in range(3):
        model(batch_of(step, 0)).float().square().mean().backward()
        optimizer.step()
    return whole_state(model)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_adapters_after_shard_are_those_before_it_in_bf16(ranks, tier):
    assert_equal(*(ranks(2).run(before_or_after, TIERS[tier], after)[0] for after in (False, True)))


def different_adapters():
    rank, _ = rank_and_world()
    model = seeded(Chain)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    if rank == 0:
        model.layers[0] = Adapted(model.layers[0])
    else:
        model.layers[1] = Adapted(model.layers[1])
    with pytest.raises(RuntimeError, match=r"different parameters.*layers\.[01]"):
        model(batch_of(0, 0))


def test_ranks_that_change_the_model_differently_are_told(ranks):
    ranks(2).run(different_adapters)


def test_a_replaced_module_and_a_replaced_parameter_are_taken_in():
    plain, model = seeded(Chain), seeded(Chain)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    for changed in (plain, model):
        torch.manual_seed(5)
        changed.layers[1] = nn.Linear(16, 16)
        changed.layers[2].bias = nn.Parameter(torch.randn(16))
    assert torch.equal(model(batch_of(0, 0)), plain(batch_of(0, 0)))
    optimizers = unwall.AdamW(model.parameters(), lr=LR), torch.optim.AdamW(plain.parameters(), lr=LR)
    for changed, optimizer in zip((model, plain), optimizers, strict=True):
        changed(batch_of(1, 0)).square().mean().backward()
        optimizer.step()
    assert_close(plain.state_dict(), model.state_dict())


def test_a_tied_parameter_that_is_replaced_stays_tied():
    plain, model = seeded(TiedNet), seeded(TiedNet)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    for changed in (plain, model):
        weight = nn.Parameter(torch.full_like(seeded(TiedNet).embed.weight, 0.1))
        changed.embed.weight = changed.head.weight = weight
    torch.manual_seed(0)
    batch = tokens()
    optimizers = unwall.AdamW(model.parameters(), lr=LR), torch.optim.AdamW(plain.parameters(), lr=LR)
    for changed, optimizer in zip((model, plain), optimizers, strict=True):
        token_loss(changed, batch).backward()
        optimizer.step()
    assert_close(plain.state_dict(), model.state_dict())


def test_a_new_parameter_made_of_absent_ones_is_named():
    model = seeded(Chain)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    model.layers[3].weight = nn.Parameter(torch.full((16, 16), float("nan")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"layers\.3\.weight came into the model.*full_params"):
            model(batch_of(0, 0))


def llama(**changes):
    shape = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=1, max_position_embeddings=32, **changes)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def text(step, rank=0):
    return torch.randint(48, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def test_resized_embeddings_are_taken_in():
    plain, model = llama(tie_word_embeddings=True), llama(tie_word_embeddings=True)
    unwall.shard(model, Plan(compute_dtype=torch.float32, params="host", optimizer="host"))
    torch.manual_seed(3)
    plain.resize_token_embeddings(52, mean_resizing=False)
    torch.manual_seed(3)
    with unwall.full_params(model):
        model.resize_token_embeddings(52, mean_resizing=False)
    optimizers = unwall.AdamW(model.parameters(), lr=LR), torch.optim.AdamW(plain.parameters(), lr=LR)
    for step in range(2):
        for changed, optimizer in zip((model, plain), optimizers, strict=True):
            changed(input_ids=text(step), labels=text(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(plain.state_dict(), model.state_dict())


def with_lora(model):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.copy_(0.1 * torch.randn(param.shape))
    return model


def train_lora(dtype, fields, folder, after):
    """A real adapter library, before or after ``shard``."""
    rank, _ = rank_and_world()
    model = llama() if after else with_lora(llama())
    plan = Plan(compute_dtype=dtype, **fields, disk=folder if "disk" in fields.values() else None)
    unwall.shard(model, plan)
    if after:
        model = with_lora(model)
    optimizer = unwall.AdamW([param for param in model.parameters() if param.requires_grad], lr=LR)
    before = 0
    for step in range(4):
        model(input_ids=text(step, rank), labels=text(step, rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            before = unwall.api.engine(model).executor.trace.mismatches
    assert unwall.api.engine(model).executor.trace.mismatches == before, "the library's own way of calling hides the order"
    assert sum(value.numel() for value in model.state_dict().values()) > 0 or rank
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
@pytest.mark.parametrize("tier", TIERS)
def test_peft_after_shard_is_peft_before_it(ranks, tmp_path, tier, world, dtype):
    pytest.importorskip("peft")
    before, after = (ranks(world).run(train_lora, dtype, TIERS[tier], tmp_path, after)[0] for after in (False, True))
    assert_equal(before, after)


def test_a_second_adapter_and_plain_pytorch():
    peft = pytest.importorskip("peft")
    plain, model = with_lora(llama()), llama()
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    model = with_lora(model)
    assert torch.equal(model(text(0)).logits, plain(text(0)).logits)
    for changed in (plain, model):
        torch.manual_seed(4)
        changed.add_adapter("second", peft.LoraConfig(r=2, target_modules=["o_proj"]))
        changed.set_adapter("second")
    optimizers = [
        make([param for param in changed.parameters() if param.requires_grad], lr=LR)
        for make, changed in ((unwall.AdamW, model), (torch.optim.AdamW, plain))
    ]
    for step in range(2):
        for changed, optimizer in zip((model, plain), optimizers, strict=True):
            changed(input_ids=text(step), labels=text(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(plain.state_dict(), model.state_dict())


def flattened(model, **options):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def refused_wrappers(tier):
    model = seeded(Chain)
    unwall.shard(model, Plan(compute_dtype=torch.float32, params=tier, optimizer=tier))
    for resident in (False, True):
        for outer in (model, nn.Sequential(model, nn.Linear(16, 16))):
            for wrapper in (DistributedDataParallel, DataParallel):
                with pytest.raises(RuntimeError, match=f"{wrapper.__name__} around a sharded model"):
                    wrapper(outer)
            for options in ({}, {"use_orig_params": True}):
                with pytest.raises(RuntimeError, match="FullyShardedDataParallel around a sharded model"):
                    flattened(outer, **options)
            with pytest.raises(RuntimeError, match=r"fully_shard \w+ a sharded model"):
                fully_shard(outer)
        with pytest.raises(RuntimeError, match="fully_shard on a sharded model"):
            fully_shard(model.layers[0])
        result = float(model(batch_of(0, 0)).sum())
        assert resident or unwall.stats(model).tiers["device"].live_bytes
    return result


@pytest.mark.parametrize("tier", ["device", "host"])
def test_ddp_and_fsdp_around_a_sharded_model_are_refused_by_name(ranks, tier):
    assert ranks(2).run(refused_wrappers, tier)[0] == pytest.approx(float(seeded(Chain)(batch_of(0, 0)).sum()))


def test_zero_grad_of_a_module_around_the_model():
    model = seeded(Chain)
    unwall.shard(model, Plan(compute_dtype=torch.float32))
    outer = nn.Sequential(model, nn.Linear(16, 16))
    optimizer = unwall.AdamW(model.parameters(), lr=LR)
    outer(batch_of(0, 0)).sum().backward()
    outer.zero_grad()
    optimizer.step()
    assert outer[1].weight.grad is None
    assert_equal(seeded(Chain).state_dict(), model.state_dict())
    assert unwall.stats(outer).tiers["device"].live_bytes > 0


@pytest.mark.parametrize("what", ["thawed", "new"])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_shard_has_not_judged_is_judged_with_the_optimizer(tier, what):
    """Not found too large in a step: the refusal names a budget that does."""
    budget = f"{tier}_bytes"
    fields = {"params": tier, "optimizer": tier, "compute_dtype": torch.float32}

    def begin(**given):
        model = blocks()
        if what == "thawed":
            model[:2].requires_grad_(False)
        unwall.shard(model, Plan(**fields, **given))
        if what == "thawed":
            model[:2].requires_grad_(True)
        else:
            model[-1] = nn.Linear(64, 8)
        return model, unwall.AdamW(model.parameters())

    frozen = blocks()
    frozen[:2].requires_grad_(what == "new")
    with pytest.raises(unwall.PlanError, match="does not fit AdamW") as refusal:
        begin(**{budget: smallest(frozen, budget, **fields)})
    name, needed = named_budget(refusal.value)
    assert name == budget
    model, optimizer = begin(**{budget: needed})
    for number in range(2):
        take_step(model, optimizer, Setup(dtype=torch.float32), number)
    assert over_budget(model) == []
