"""Weights and checkpoints of models that are spread over tensor ranks or cut into pipeline stages: whole files, any mesh."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from parallel_tools import ADAMW, VOCABULARY, WIDTH, batch, build, logits, loss_of, made, mesh_of, spread
from safetensors.torch import load_file, save_file
from torch import nn

import unwall
from unwall.checkpoint.offline import export_checkpoint

PLAN = unwall.Plan(compute_dtype=torch.float32)
HOST = unwall.Plan(compute_dtype=torch.float32, stage=1, params="host", optimizer="host")


def sizes(layers=2):
    common = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "use_cache": False}
    return common | heads


def llama(layers=2, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes(layers), tie_word_embeddings=tied))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**sizes(), num_local_experts=4, num_experts_per_tok=2))


def step(model, rank):
    optimizer = unwall.AdamW(model.parameters(), **ADAMW)
    tokens, target = batch(0, rank)
    loss_of(logits(model(tokens)), target).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model.state_dict()


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def pretrained_there_and_back(folder, shape, options):
    """A directory of ``save_pretrained`` into tensor ranks, a step, and out again."""
    mesh = mesh_of(**shape)
    model = unwall.from_pretrained(folder, unwall.Plan(compute_dtype=torch.float32, **options), mesh, dtype=torch.float32)
    spread_names = sum(hasattr(param, "placements") for param in model.parameters())
    before = model.state_dict()
    after = step(model.train(), mesh.get_local_rank("dp"))
    unwall.export_weights(model, f"{folder}/out", max_shard_size="40KB")
    return spread_names, before, after


@pytest.mark.parametrize("build", [llama, mixtral])
def test_a_directory_goes_into_tensor_ranks_and_out_again(ranks, tmp_path, build):
    plain = build()
    plain.save_pretrained(tmp_path)
    options = {} if build is llama else {"stage": 0, "params": "host", "optimizer": "host"}
    shape = {"dp": 2, "tp": 2} if build is llama else {"dp": 1, "tp": 4}
    (cut, before, after), *_ = ranks(4).run(pretrained_there_and_back, str(tmp_path), shape, options)
    assert cut > 0
    same(before, plain.state_dict())
    again, keys = type(plain).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(keys.values())
    same(again.state_dict(), after)


def by_name(folder):
    """A plain model, columns and rows cut: loaded into a sharded one, one without memory, and one that is not sharded."""
    mesh, found = mesh_of(dp=2, tp=2), []
    model, _ = made(mesh)
    keys = unwall.load_weights(model, f"{folder}/model.safetensors")
    found.append(model.state_dict())
    unwall.export_weights(model, f"{folder}/out")
    with torch.device("meta"):
        empty = spread(build(), mesh["tp"], "sequence")
    unwall.load_weights(empty, f"{folder}/model.safetensors")
    unwall.shard(empty, HOST, mesh)
    found.append(empty.state_dict())
    spare = spread(build(), mesh["tp"], "plain")
    unwall.load_weights(spare, f"{folder}/model.safetensors")
    found.append(
        {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in spare.state_dict().items()}
    )
    with pytest.raises(RuntimeError, match="size mismatch for head"):
        unwall.load_weights(model, f"{folder}/wrong.safetensors")
    return list(keys), found


def test_weights_of_a_plain_model_by_name(ranks, tmp_path):
    torch.manual_seed(1)
    values = {name: torch.randn_like(value) for name, value in build().state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    save_file({**values, "head.weight": torch.zeros(3, WIDTH)}, tmp_path / "wrong.safetensors")
    (keys, found), *_ = ranks(4).run(by_name, str(tmp_path))
    assert keys == [[], []]
    for state in (*found, load_file(tmp_path / "out/model.safetensors")):
        same(state, values)


def stages_read(folder, shape, schedule, absent):
    """A directory of ``save_pretrained`` into pipeline stages: what each of them holds, trains, reads and writes."""
    mesh, stored = mesh_of(**shape), []
    options = {"microbatches": 4, "loss": loss_of, "schedule": schedule, "dtype": torch.float32}
    with pytest.warns(UserWarning, match=absent) if absent else contextlib.nullcontext():
        part, runs = unwall.from_pretrained(folder, HOST, mesh, **options)
    for name, param in part.named_parameters():
        stored.append((name, param.numel()))
    before = part.train().state_dict()
    optimizer = unwall.AdamW(part.parameters(), **ADAMW, max_grad_norm=1.0)
    run_steps(mesh, runs, optimizer, 1)
    unwall.export_weights(part, f"{folder}/out")
    return stored, before, part.state_dict()


def over_ranks(results, at):
    return {name: value for result in results for name, value in result[at].items()}


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [({"pp": 2, "dp": 2}, "Interleaved1F1B"), ({"pp": 2, "tp": 2}, "1F1B")],
    ids=["data ranks", "tensor ranks"],
)
def test_a_directory_goes_into_the_stages_of_a_pipeline(ranks, tmp_path, shape, schedule):
    plain = llama(layers=4)
    plain.save_pretrained(tmp_path)
    results = ranks(4).run(stages_read, str(tmp_path), shape, schedule, "")
    whole_numel = sum(param.numel() for param in plain.parameters())
    for stored, _, _ in results:
        assert sum(numel for _, numel in stored) < 0.7 * whole_numel
    same(over_ranks(results, 1), plain.state_dict())
    again, keys = type(plain).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(keys.values())
    same(again.state_dict(), over_ranks(results, 2))
    assert not torch.equal(again.lm_head.weight, plain.lm_head.weight)


def test_a_weight_of_one_stage_that_no_file_holds(ranks, tmp_path):
    plain = llama()
    plain.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    results = ranks(4).run(stages_read, str(tmp_path), {"pp": 2, "dp": 2}, "1F1B", "lm_head")
    found = over_ranks(results, 1)
    head = found.pop("lm_head.weight")
    assert 0.01 < head.std() < 0.03
    same(found, {name: value for name, value in plain.state_dict().items() if name != "lm_head.weight"})


class Counted(nn.Module):
    """A layer with a buffer and a state of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        self.note = "new"

    def forward(self, x):
        self.seen += 1
        return x + self.linear(x)

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Counted() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY))


def cut(model, shape, plan=PLAN, schedule="1F1B"):
    mesh = mesh_of(**shape)
    if shape.get("tp", 1) > 1:
        unwall.parallelize(model, mesh)
    part, runs = unwall.pipeline(model, plan, mesh=mesh, microbatches=4, loss=loss_of, schedule=schedule)
    return mesh, part, runs, unwall.AdamW(part.parameters(), **ADAMW, max_grad_norm=1.0)


def run_steps(mesh, runs, optimizer, steps, first=0):
    stages = getattr(runs, "_stages", None) or [runs._stage]
    replica = mesh.get_local_rank("dp") if "dp" in mesh.mesh_dim_names else 0
    for number in range(first, first + steps):
        tokens, target = batch(number, replica)
        given = {"target": target, "losses": []} if any(stage.is_last for stage in stages) else {}
        runs.step(*([tokens] if any(stage.is_first for stage in stages) else []), **given)
        optimizer.step()
        optimizer.zero_grad()


def whole(part, optimizer):
    """The model and its states, put together from all ranks, by name."""
    names = [name for name, _ in part.named_parameters()]
    states = optimizer.state_dict()["state"]
    mine = part.state_dict(), {names[number]: entry for number, entry in states.items()}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [{name: value for theirs in every for name, value in theirs[kind].items()} for kind in (0, 1)]


def assert_same_training(found, wanted):
    same(
        {name: value for name, value in found[0].items() if isinstance(value, torch.Tensor)},
        {name: value for name, value in wanted[0].items() if isinstance(value, torch.Tensor)},
    )
    assert found[1].keys() == wanted[1].keys()
    for name, entry in wanted[1].items():
        same(found[1][name], entry)


def stages_saved(build, folder, others):
    """Saved on (pp 2, dp 2); loaded by a pipeline over other ranks, which goes on as the first one does."""
    mesh, part, runs, optimizer = cut(build(), {"pp": 2, "dp": 2})
    for module in part.modules():
        if isinstance(module, Counted):
            module.note = "old"
    run_steps(mesh, runs, optimizer, 2)
    saved = whole(part, optimizer)
    unwall.save(f"{folder}/saved", part, optimizer, extra={"step": 2})
    unwall.export_weights(part, f"{folder}/direct")
    found = []
    for shape, plan, schedule in others:
        _, other, _, its = cut(build(), shape, plan, schedule)
        assert unwall.load(f"{folder}/saved", other, its) == {"step": 2}
        assert all(module.note == "old" for module in other.modules() if isinstance(module, Counted))
        found.append(whole(other, its))
        unwall.save(f"{folder}/again-{len(found)}", other, its)
    return saved, found


def alone(model, folder):
    """One process, with the checkpoint."""
    unwall.shard(model, PLAN)
    optimizer = unwall.AdamW(model.parameters(), **ADAMW, max_grad_norm=1.0)
    unwall.load(folder, model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    return model.state_dict(), {names[at]: entry for at, entry in optimizer.state_dict()["state"].items()}


def test_a_checkpoint_of_stages_is_one_of_the_whole_model(ranks, tmp_path):
    others = [({"pp": 4}, HOST, "1F1B"), ({"pp": 2, "dp": 2}, PLAN, "Interleaved1F1B")]
    results = ranks(4).run(stages_saved, layers, str(tmp_path), others)
    for saved, found in results:
        for other in found:
            assert_same_training(other, saved)
    saved = results[0][0]
    for folder in ("saved", "again-1", "again-2"):
        assert_same_training(alone(layers(), tmp_path / folder), saved)
    export_checkpoint(tmp_path / "saved", tmp_path / "exported")
    wanted = {name: value for name, value in saved[0].items() if isinstance(value, torch.Tensor)}
    for folder in ("direct", "exported"):
        same(load_file(tmp_path / folder / "model.safetensors"), wanted)


def test_stages_of_a_decoder_over_tensor_ranks(ranks, tmp_path):
    results = ranks(4).run(stages_saved, llama, str(tmp_path), [({"pp": 2, "tp": 2}, PLAN, "1F1B")])
    saved, (other,) = results[0]
    assert_same_training(other, saved)
    export_checkpoint(tmp_path / "again-1", tmp_path / "exported")
    for folder in ("direct", "exported"):
        same(type(llama()).from_pretrained(tmp_path / folder).state_dict(), saved[0])
    assert_same_training(alone(llama(), tmp_path / "again-1"), saved)


def refused(folder):
    """Before anything is written or allocated."""
    mesh, said = mesh_of(pp=2, tp=2), []
    with pytest.raises(ValueError, match=r"unwall.from_pretrained\(path, plan, mesh, microbatches=8") as error:
        unwall.from_pretrained(folder, PLAN, mesh)
    said.append(str(error.value))
    with pytest.raises(ValueError, match="loss, which are for a pipeline"):
        unwall.from_pretrained(folder, PLAN, mesh_of(dp=4), loss=loss_of)
    with pytest.raises(ValueError, match="over a mesh of dp 4: expected a mesh with a dimension 'pp'"):
        unwall.from_pretrained(folder, PLAN, mesh_of(dp=4), microbatches=2)
    _, part, _, _ = cut(layers(), {"pp": 2, "dp": 2})
    optimizer = unwall.AdamW(part.parameters(), lr=0.1 * (1 + dist.get_rank() // 2))
    with pytest.raises(unwall.CheckpointError) as error:
        unwall.save(f"{folder}/refused", part, optimizer)
    said.append(str(error.value))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: .more.") as error:
        unwall.load_weights(part, f"{folder}/more.safetensors")
    return [*said, str(error.value)]


def test_what_cannot_be_done_is_refused_first(ranks, tmp_path):
    state = {name: value for name, value in layers().state_dict().items() if isinstance(value, torch.Tensor)}
    save_file({**state, "more": torch.zeros(1)}, tmp_path / "more.safetensors")
    for stage, said in enumerate(ranks(4).run(refused, str(tmp_path))):
        assert "a mesh of pp 2 x tp 2" in said[0]
        assert "the same number of param groups" in said[1]
        assert "Missing" not in said[2], stage
    assert not list((tmp_path / "refused").glob("[!.]*"))
