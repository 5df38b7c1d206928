"""Inputs of recomputed blocks in parts over the tensor ranks: the same bits as whole ones, in less memory."""

from unittest.mock import patch

import pytest
import torch
from parallel_tools import WIDTH, batch, build, logits, loss_of, made, mesh_of, spread
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import unwall
from unwall.runtime import auto, saved_on_host
from unwall.schedule.activations import NO_LINK


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attention_dropout": 0.0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64, use_cache=False)).train()


def trained(kind, options, sizes):
    """The parameters after three steps, and the bytes that autograd saved in the first forward."""
    mesh, saved = mesh_of(**sizes), []
    model = unwall.parallelize(llama(), mesh) if kind == "llama" else spread(build(), mesh["tp"], kind)
    options = {"activations": "recompute", **options}
    model, optimizer = made(mesh, model=model, **options)

    def count(tensor):
        saved.append(tensor.nbytes)
        return tensor

    for step in range(3):
        tokens, target = batch(step, mesh.get_local_rank("dp"))
        tokens, target = (rows[:, : 8 - 2 * step] for rows in (tokens, target))  # other shapes
        with saved_tensors_hooks(count, lambda tensor: tensor):
            output = logits(model(tokens))
        loss_of(output, target).backward(retain_graph=step == 1)
        if step == 1:
            loss_of(output, target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), sum(saved)


CASES = {
    "plain": ("plain", {}, {"dp": 1, "tp": 2}),
    "four": ("plain", {"activations": "host", "stage": 1}, {"dp": 1, "tp": 4}),
    "library": ("llama", {}, {"dp": 2, "tp": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_give_the_same_bits_in_less_memory(ranks, case):
    kind, options, sizes = CASES[case]
    pool = ranks(sizes["dp"] * sizes["tp"])
    whole = pool.run(trained, kind, options, sizes)
    parts = pool.run(trained, kind, {**options, "partition_activations": True}, sizes)
    for name, value in whole[0][0].items():
        assert torch.equal(parts[0][0][name], value), name
    inputs = sum(3 * 4 * (8 - 2 * step) * WIDTH * 4 for step in range(3))  # three blocks, four rows of tokens, fp32
    for (_, before), (_, after) in zip(whole, parts, strict=True):
        assert inputs * (1 - 1 / sizes["tp"]) * 0.9 < before - after <= inputs


def test_what_the_ranks_have_cut_already_stays(ranks):
    whole = ranks(4).run(trained, "sequence", {}, {"dp": 2, "tp": 2})
    parts = ranks(4).run(trained, "sequence", {"partition_activations": True}, {"dp": 2, "tp": 2})
    assert [after for _, after in parts] == [before for _, before in whole]
    assert all(torch.equal(parts[0][0][name], value) for name, value in whole[0][0].items())


class Odd(nn.Module):
    """Nothing of it is spread, and what it computes cannot be cut into equal parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 5)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(5, 1, 7, dropout=0.3, batch_first=True) for _ in range(2))
        self.head = nn.Linear(5, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x += 1  # what was kept of it is not changed
            x = block(x)
        return self.head(x)


def odd(partition):
    """Gradients, with random numbers that the recomputation repeats; and an error where the ranks differ after all."""
    mesh = mesh_of(dp=1, tp=2)
    model, _ = made(mesh, model=Odd(), activations="recompute", partition_activations=partition)
    torch.manual_seed(5)
    tokens, target = (rows[:3, :7] for rows in batch(0, 0))
    loss_of(model(tokens), target).backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    said = ""
    try:
        loss_of(model((tokens + mesh.get_local_rank("tp")) % 64), target).backward()
    except RuntimeError as error:
        said = str(error)
    return found, said


def test_random_numbers_odd_sizes_and_ranks_that_differ_later(ranks):
    (whole, nothing), (parts, said) = (ranks(2).run(odd, partition)[0] for partition in (False, True))
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    assert nothing == ""
    assert "was not the same on all tensor ranks" in said


def test_plans_that_cannot_be_carried_out():
    with pytest.raises(unwall.PlanError, match="recompute"):
        unwall.Plan(partition_activations=True, activations="keep")
    with pytest.raises(unwall.PlanError, match="needs a tensor-parallel dimension"):
        unwall.shard(build(), unwall.Plan(partition_activations=True, activations="recompute"))


def decided(budgets):
    """What ``activations="auto"`` makes of each block, pass by pass, where one tensor rank has little room."""
    mesh, found = mesh_of(dp=1, tp=2), []
    model, optimizer = made(mesh, activations="auto", device_bytes=budgets[mesh.get_local_rank("tp")])
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        tokens = torch.randint(64, (64, 32), generator=generator)
        loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(list(unwall.api.engine(model).activations.used))
    return found


def test_tensor_ranks_decide_together(ranks):
    first, second = ranks(2).run(decided, ["4MiB", "1GiB"])
    assert first == second
    assert any(choice != "keep" for choice in first[-1])


def large(folder, options):
    """Parameters after some steps, where the input of a block is 1 MiB. And of the last pass: what left the device, and what
    ``"auto"`` did."""
    if options["activations"] == "disk":
        options = {**options, "disk": folder}
    mesh = mesh_of(dp=1, tp=2)
    with patch.object(saved_on_host, "MIN_BYTES", 512 << 10), patch.object(auto, "link_of", lambda *_: NO_LINK):
        model, optimizer = made(mesh, **options)  # half of an input moves; "auto" moves nothing, however fast the link is
        tokens = torch.randint(64, (64, 128), generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            unwall.stats(model).reset()
            loss_of(model(tokens), tokens).backward()
            optimizer.step()
    links, found = unwall.stats(model).links, unwall.api.engine(model).activations
    blocks = None if found is None else (list(found.used), [block.input_bytes for block in found.blocks])
    return model.state_dict(), links["device>host"].moved_bytes if "device>host" in links else 0, blocks


@pytest.mark.parametrize("activations", ["host", "disk"])
def test_parts_of_large_inputs_leave_the_device(ranks, tmp_path, activations):
    whole = ranks(2).run(large, tmp_path, {"activations": activations})
    parts = ranks(2).run(large, tmp_path, {"activations": activations, "partition_activations": True})
    for (values, before, _), (found, after, _) in zip(whole, parts, strict=True):
        assert all(torch.equal(found[name], value) for name, value in values.items())
        # Without parts: the inputs of two blocks (the first one's is a collective's, and stays) and the last norm's.
        assert before == 3 << 20
        assert after == (3 << 19) + (1 << 20)  # half of each block's input, and the last norm's


def test_auto_keeps_parts_of_what_it_recomputes(ranks, tmp_path):
    kept = ranks(2).run(large, tmp_path, {"activations": "keep"})[0][0]
    small = {"activations": "auto", "device_bytes": "6MiB"}
    whole = ranks(2).run(large, tmp_path, small)
    parts = ranks(2).run(large, tmp_path, {**small, "partition_activations": True})
    for found in (whole[0][0], parts[0][0]):
        assert all(torch.equal(found[name], value) for name, value in kept.items())
    assert parts[0][2] == parts[1][2]
    (used, inputs), (_, before) = parts[0][2], whole[0][2]
    assert "recompute" in used
    assert [2 * nbytes for nbytes in inputs] == before
