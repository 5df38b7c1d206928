"""PEFT and accelerate around a sharded model: merging adapters and loading checkpoints writes to parameters outside a pass."""

import copy
import tempfile

import pytest
import torch
import transformers

import unwall

peft, accelerate = pytest.importorskip("peft"), pytest.importorskip("accelerate")

IDS = torch.arange(16).view(2, 8)
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
KINDS = {"lora": {}, "dora": {"use_dora": True}, "saved": {"modules_to_save": ["lm_head"]}}


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def with_adapters(kind):
    model = peft.get_peft_model(llama(), peft.LoraConfig(**LORA, **KINDS[kind]))
    torch.manual_seed(3)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1)
    return model


def shard(model, tier, compute=torch.float32):
    tiers = {} if tier == "device" else {"params": tier, "optimizer": tier}
    if tier == "disk":
        tiers["disk"] = tempfile.mkdtemp()
    return unwall.shard(model, unwall.Plan(compute_dtype=compute, **tiers))


def merged(kind, tier, compute):
    """One step, then merge_adapter, unmerge_adapter and merge_and_unload: what the model gives and saves."""
    model = with_adapters(kind)
    shard(model, tier, compute)
    optimizer = unwall.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = model(input_ids=IDS).logits.detach().float()
    model.merge_adapter()
    during = model(input_ids=IDS).logits.detach().float()
    model.unmerge_adapter()
    base = model.merge_and_unload()
    after = base(input_ids=IDS).logits.detach().float()
    return before, during, after, {name: value.clone() for name, value in base.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2])
def test_merging_gives_what_it_gives_plainly(ranks, kind, world):
    cases = (
        [("device", torch.float32), ("host", torch.bfloat16), ("disk", torch.float32)]
        if world == 1
        else [("host", torch.float32)]
    )
    for tier, compute in cases:
        before, during, after, state = ranks(world).run(merged, kind, tier, compute)[0]
        close = {"rtol": 1e-4, "atol": 1e-5} if compute is torch.float32 else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(during, before, **close)
        torch.testing.assert_close(after, before, **close)
        plain = llama()
        plain.load_state_dict(state)
        torch.testing.assert_close(plain(input_ids=IDS).logits.detach(), before, **close)


def saved_tokens(folder):
    model = peft.get_peft_model(llama(), peft.LoraConfig(trainable_token_indices=[3, 5], **LORA))
    shard(model, "host", torch.float32)
    optimizer = unwall.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.save_pretrained(folder)
    return model(input_ids=IDS).logits.detach()


def test_trained_tokens_are_saved_on_several_ranks(ranks, tmp_path):
    """PEFT looks them up by name on every rank."""
    expected = ranks(2).run(saved_tokens, tmp_path)[0]
    again = peft.PeftModel.from_pretrained(llama(), tmp_path)
    torch.testing.assert_close(again(input_ids=IDS).logits.detach(), expected)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_accelerate_loads_a_checkpoint(tier, tmp_path):
    source = llama()
    with torch.no_grad():
        for param in source.parameters():
            param.mul_(1.5)
    expected = copy.deepcopy(source.state_dict())
    source.save_pretrained(tmp_path)
    model = shard(llama(), tier, torch.bfloat16)
    accelerate.load_checkpoint_in_model(model, str(tmp_path))
    state = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()


def prefixed():
    torch.manual_seed(0)
    return peft.get_peft_model(llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def losses(model, optimizer):
    found = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("activations", ["recompute", "host"])
def test_recomputed_blocks_take_no_prefix(activations):
    with pytest.raises(unwall.PlanError, match=r"prefix tuning .*activations='auto'"):
        unwall.shard(prefixed(), unwall.Plan(activations=activations))


def test_prefix_tuning_where_blocks_may_be_recomputed():
    model, other = prefixed(), prefixed()
    unwall.shard(model, unwall.Plan(compute_dtype=torch.float32, activations="auto", device_bytes="1GiB"))
    trained = [param for param in model.parameters() if param.requires_grad]
    plain = torch.optim.AdamW([param for param in other.parameters() if param.requires_grad], lr=1e-2)
    assert losses(model, unwall.AdamW(trained, lr=1e-2)) == pytest.approx(losses(other, plain), rel=1e-5)
