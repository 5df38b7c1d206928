"""Tensor parallelism under every stage and tier is plain PyTorch; what comes out is whole."""

import itertools

import pytest
import torch
import torch.distributed as dist
from parallel_tools import (
    ADAMW,
    CLIP,
    Net,
    apart,
    batch,
    build,
    library_model,
    loss_of,
    made,
    mesh_of,
    norms_apart,
    spread,
    train,
    train_plain,
)
from torch import nn

import unwall

HOST = {"params": "host", "optimizer": "host", "device_bytes": 300 << 10}


def tiers(folder):
    return {"device": {}, "host": HOST, "disk": {"params": "disk", "optimizer": "disk", "disk": str(folder)}}


def parity(cases, steps=5):
    """How far each case's parameters and norms are from one plain process."""
    reference, expected = train_plain(build(), steps, 2)
    found = []
    for kind, options in cases:
        mesh = mesh_of(dp=2, tp=2)
        model, optimizer = made(mesh, kind, **options)
        norms = train(model, optimizer, steps, mesh.get_local_rank("dp"), kind)
        found.append((apart(model.state_dict(), reference), norms_apart(norms, expected)))
    return found


def test_it_trains_as_one_process_does(ranks):
    cases = [("plain", {}), ("sequence", {"stage": 1, **HOST, "device_bytes": None}), ("loss", {"stage": 2})]
    for parameters, norm in ranks(4).run(parity, cases)[0]:
        assert parameters < 1e-6
        assert norm < 1e-6


@pytest.mark.drill
def test_every_stage_kind_and_tier(ranks, tmp_path):
    for kind in ("plain", "sequence", "loss"):
        cases = [(kind, {"stage": stage, **where}) for where, stage in itertools.product(tiers(tmp_path).values(), range(4))]
        for case, (parameters, norm) in zip(cases, ranks(4).run(parity, cases)[0], strict=True):
            assert (parameters < 1e-6, norm < 1e-6) == (True, True), case


def library_parity(kinds):
    """The same for models with plans of their own: parameters, and norms by how large they are."""
    mesh, found = mesh_of(dp=2, tp=2), []
    for number, kind in enumerate(kinds):
        reference, expected = train_plain(library_model(kind), 5, 2)
        spread_out = unwall.parallelize(library_model(kind), mesh)
        model, optimizer = made(mesh, model=spread_out, **(HOST if number % 2 else {}))
        norms = train(model, optimizer, 5, mesh.get_local_rank("dp"))
        found.append((apart(model.state_dict(), reference), norms_apart(norms, expected) / max(expected)))
    return found


def test_models_of_the_library_train_as_one_process_does(ranks):
    for parameters, norm in ranks(4).run(library_parity, ["Llama", "Qwen3", "Mixtral"])[0]:
        assert parameters < 1e-6
        assert norm < 1e-6


def adapted(model, **options):
    import peft

    torch.manual_seed(1)
    targets = ["q_proj", "down_proj"]  # cut by columns, and by rows
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options))


def train_adapters():
    """How far adapters of a spread model are from those of a plain one, and what is said of others."""
    mesh, plain, said = mesh_of(dp=2, tp=2), adapted(library_model("Llama")), []
    with pytest.raises(ValueError) as error:
        unwall.parallelize(plain, mesh)
    said.append(str(error.value))
    model, optimizer = made(mesh, model=adapted(unwall.parallelize(library_model("Llama"), mesh)))
    model.load_state_dict(plain.state_dict())
    norms = train(model, optimizer, 3, mesh.get_local_rank("dp"))
    reference, expected = train_plain(plain, 3, 2)
    unseen = unwall.parallelize(library_model("Llama"), mesh)
    for module in unseen.modules():
        module.__dict__.pop("_hf_tp_plan", None)
    copied = adapted(unwall.parallelize(library_model("Llama"), mesh), modules_to_save=["lm_head"])
    for wrong in (adapted(unseen), copied):
        with pytest.raises(ValueError) as error:
            unwall.shard(wrong, None, mesh)
        said.append(str(error.value))
    return apart(model.state_dict(), reference), norms_apart(norms, expected), said


def test_adapters_are_spread_as_their_layers_are(ranks):
    pytest.importorskip("peft")
    far, norm, said = ranks(4).run(train_adapters)[0]
    assert max(far, norm) < 5e-6
    assert "q_proj has an adapter already: call unwall.parallelize first" in said[0]
    assert "q_proj is not spread over the tensor ranks, but the layer is" in said[1]
    assert "modules_to_save with base_model.model.lm_head" in said[2]


def narrow(options):
    """bf16 and fp16: trained, finite, and the same on every tier."""
    found = []
    for where in ({}, HOST):
        mesh = mesh_of(dp=2, tp=2)
        model, optimizer = made(mesh, "sequence", **{**where, **options})
        for step in range(3):
            tokens, target = batch(step, mesh.get_local_rank("dp"))
            optimizer.scale(loss_of(model(tokens).float(), target)).backward()
            optimizer.step()
        found.append(model.state_dict())
    return found if dist.get_rank() == 0 else []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_give_the_same_on_every_tier(ranks, dtype):
    device, host = ranks(4).run(narrow, {"compute_dtype": dtype})[0]
    start = build().state_dict()
    for name, value in device.items():
        assert value.dtype is torch.float32
        assert torch.equal(value, host[name])
        assert value.isfinite().all()
        assert not torch.equal(value, start[name])


def in_and_out(folder):
    """State dicts and a checkpoint of (2, 2), loaded over other meshes."""
    mesh = mesh_of(dp=2, tp=2)
    model, optimizer = made(mesh, "sequence")
    train(model, optimizer, 2, mesh.get_local_rank("dp"))
    state, states = model.state_dict(), optimizer.state_dict()
    unwall.save(f"{folder}/saved", model, optimizer)
    found = []
    for dp, tp in ((4, 1), (1, 4)):
        other, its = made(mesh_of(dp=dp, tp=tp), "sequence", stage=1)
        unwall.load(f"{folder}/saved", other, its)
        found.append((other.state_dict(), its.state_dict()["state"]))
    other, its = made(mesh, "sequence", **HOST)
    other.load_state_dict(state)  # rank 0 has it, the others have nothing
    its.load_state_dict(states)
    found.append((other.state_dict(), its.state_dict()["state"]))
    with torch.device("meta"):
        empty = Net()
    empty, _ = made(mesh, model=spread(empty, mesh["tp"], "sequence"))
    empty.load_state_dict(state)
    found.append((empty.state_dict(), states["state"]))
    return state, states["state"], found


def test_whole_tensors_go_in_and_out(ranks, tmp_path):
    (state, states, found), *others = ranks(4).run(in_and_out, str(tmp_path))
    alone = unwall.shard(build(), unwall.Plan(compute_dtype=torch.float32))
    optimizer = unwall.AdamW(alone.parameters(), **ADAMW)
    unwall.load(tmp_path / "saved", alone, optimizer)
    for other, its in [*found, (alone.state_dict(), optimizer.state_dict()["state"])]:
        assert list(other) == list(state)
        assert all(torch.equal(other[name], state[name]) for name in state)
        for number, entry in states.items():
            assert all(torch.equal(its[number][name], value) for name, value in entry.items())
    assert all(not theirs[0] and not theirs[1] for theirs in others)


def by_hand():
    """Reads and writes outside a forward, ``full_params``, and gradients that are looked at."""
    mesh = mesh_of(dp=2, tp=2)
    model, optimizer = made(mesh, "sequence", **HOST)
    plain, weight, bias = build(), model.blocks[0].up.weight, model.blocks[0].up.bias
    assert torch.equal(weight.full_tensor(), plain.blocks[0].up.weight)
    with torch.no_grad():
        weight.mul_(2)
        model.norm.weight.data = torch.full((32,), 3.0)
        bias.to_local().zero_()
        with unwall.full_params(model.head, write=True):
            model.head.weight.fill_(0.25)
    with torch.no_grad():
        plain.blocks[0].up.weight.mul_(2)
        plain.norm.weight.fill_(3.0)
        plain.blocks[0].up.bias.zero_()
        plain.head.weight.fill_(0.25)
    written = apart(model.state_dict(), plain)
    for replica in range(2):
        tokens, target = batch(0, replica)
        (loss_of(plain(tokens), target) / 2).backward()
        if replica == mesh.get_local_rank("dp"):
            loss_of(model(tokens), target).backward()
    seen = (weight.grad.clone().full_tensor() - plain.blocks[0].up.weight.grad).abs().max().item()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    expected = nn.utils.clip_grad_norm_(plain.parameters(), CLIP).item()
    clipped = (weight.grad.clone().full_tensor() - plain.blocks[0].up.weight.grad).abs().max().item()
    bias.grad = plain.blocks[0].up.bias.grad = None
    optimizer.step()
    torch.optim.AdamW(plain.parameters(), **ADAMW).step()
    return written, max(seen, abs(norm - expected), clipped, apart(model.state_dict(), plain))


def test_parameters_and_gradients_by_hand(ranks):
    for written, after in ranks(4).run(by_hand):
        assert written == 0
        assert after < 1e-6


def wrapped():
    """A torch optimizer, with recomputed activations."""
    mesh = mesh_of(dp=2, tp=2)
    model, _ = made(mesh, activations="recompute", **HOST)
    optimizer = unwall.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    plain = build()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for replica in range(2):
            tokens, target = batch(step, replica)
            (loss_of(plain(tokens), target) / 2).backward()
            if replica == mesh.get_local_rank("dp"):
                loss_of(model(tokens), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.step()
        theirs.zero_grad()
    return apart(model.state_dict(), plain)


def test_a_wrapped_optimizer(ranks):
    assert ranks(4).run(wrapped)[0] < 1e-6


def replicas(options):
    """Shards in pairs, and each pair twice: two backwards to a step."""
    mesh = mesh_of(dp_replicate=2, dp_shard=2)
    model, optimizer = made(mesh, model=build() if dist.get_rank() == 0 else Net(), **options)
    plain = build()
    theirs, norms, expected = torch.optim.AdamW(plain.parameters(), **ADAMW), [], []
    for step in range(5):
        for more in range(2):
            for rank in range(4):
                tokens, target = batch(2 * step + more, rank)
                (loss_of(plain(tokens), target) / 8).backward()
                if rank == dist.get_rank():
                    (loss_of(model(tokens), target) / 2).backward()
            if step == 1:  # a look averages them, too
                assert torch.allclose(model.norm.weight.grad.clone(), plain.norm.weight.grad, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.grad_norm.item())
        expected.append(nn.utils.clip_grad_norm_(plain.parameters(), CLIP).item())
        theirs.step()
        theirs.zero_grad()
    return apart(model.state_dict(), plain), norms_apart(norms, expected)


@pytest.mark.parametrize("options", [{}, {"stage": 2, **HOST, "device_bytes": None}], ids=["device", "host"])
def test_shards_inside_replicas(ranks, options):
    assert max(ranks(4).run(replicas, options)[0]) < 1e-6


def refused():
    """What is wrong with each of these, before anything is allocated."""
    mesh, said = mesh_of(dp=2, tp=2), []
    other = mesh_of(tp=4)
    for model, given in (
        (spread(build(), mesh["tp"], "plain"), None),
        (spread(build(), other["tp"], "plain"), mesh),
        (spread(build(), other["tp"], "plain"), mesh_of(dp=4)),
        (build(), mesh_of(dp=2, cp=2)),
    ):
        with pytest.raises(ValueError) as error:
            unwall.shard(model, None, given)
        said.append(str(error.value))
    with pytest.raises(ValueError) as error:
        unwall.parallelize(build(), mesh)
    said.append(str(error.value))
    small = torch.distributed.device_mesh.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError) as error:
        unwall.shard(build(), None, small)
    said.append(str(error.value))
    with pytest.raises(TypeError, match=r"mesh is a DeviceMesh, .* got str"):
        unwall.shard(build(), None, "dp")
    with pytest.raises(TypeError, match=r"mesh is a DeviceMesh, .* got NoneType"):
        unwall.parallelize(build(), None)
    few = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match=f"rank {dist.get_rank()} is not in the mesh"):
            unwall.shard(build(), None, few)
    return said


def test_bad_meshes_are_refused(ranks):
    expected = ["give the mesh", "over the ranks", "expected: over", "'cp'", "no tensor-parallel plan", "must multiply to"]
    for said in ranks(4).run(refused):
        for part, text in zip(expected, said, strict=True):
            assert part in text, text


def different_plans(cases):
    """What is said where the first or the last rank has another plan than the others."""
    mesh, said = mesh_of(dp=2, tp=2), []
    for where, fields, special in cases:
        mine = fields[int(dist.get_rank() == special)]
        with pytest.raises(unwall.PlanError) as error:
            unwall.shard(build(), unwall.Plan(**mine), mesh if where == "mesh" else None)
        said.append(str(error.value))
    # A drive of its own is no difference, nor is a machine with more memory: the smallest decides.
    own = {"disk": f"/tmp/own-{dist.get_rank()}", "host_bytes": (1 << 30) + dist.get_rank()}
    budget = {"device_bytes": 1 << 30} if dist.get_rank() == 3 else {}
    unwall.shard(build(), unwall.Plan(**own, **budget), mesh)
    return said


def test_plans_that_differ_between_ranks_are_refused(ranks):
    cases, expected = [], []
    for where, fields, special, words in (
        ("", ({}, {"node_ranks": 2}), 3, "node_ranks is None on ranks 0, 1, 2, 2 on rank 3"),
        (
            "",
            ({"node_ranks": 2}, {"node_ranks": 2, "replica": "node"}),
            0,
            "replica is 'node' on rank 0, None on ranks 1, 2, 3",
        ),
        ("", ({}, {"optimizer": "host"}), 3, "optimizer is 'auto' on ranks 0, 1, 2, 'host' on rank 3"),
        ("mesh", ({}, {"stage": 1, "keep_fp32": bool}), 0, "stage is 1 on rank 0, 3 on ranks 1, 2, 3; keep_fp32 is a function"),
    ):
        cases.append((where, fields, special))
        expected.append(f"the ranks have different plans: {words}")
    for said in ranks(4).run(different_plans, cases):
        for words, text in zip(expected, said, strict=True):
            assert text.startswith(words), text
            assert text.endswith("Give every rank the same plan")
