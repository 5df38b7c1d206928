"""Real models through files: save_pretrained, load_weights, a training step, export_weights, from_pretrained."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from hub_models import KINDS, ODD_KINDS, loss_of, tiny
from ranks import rank_and_world
from safetensors.torch import load_file

import unwall
from unwall.checkpoint.weight_files import WeightFiles


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(kind)``: a directory that the library wrote, once per kind."""
    made: dict[str, Path] = {}

    def save(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            tiny(kind).save_pretrained(made[kind])
        return made[kind]

    return save


def zeroed(kind, dtype=torch.float32):
    model = tiny(kind).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model


def wanted_of(kind, folder, dtype):
    library = type(tiny(kind))
    return {name: value.clone() for name, value in library.from_pretrained(folder, dtype=dtype).state_dict().items()}


def assert_same(found, wanted):
    """Equal in the dtype that is wanted: ``state_dict`` may show more precision."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name].to(value.dtype), value), name


def there_and_back(kind, folder, out, options, dtype, limit):
    """What each rank does. Rank 0 gives the weights after the step."""
    model = unwall.shard(zeroed(kind, dtype), unwall.Plan(**options))
    keys = unwall.load_weights(model, folder)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    loaded = model.state_dict()
    if rank_and_world()[0] == 0:
        assert_same(loaded, wanted_of(kind, folder, dtype))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    model.train()
    loss_of(model, kind).backward()
    optimizer.step()
    unwall.export_weights(model, out, max_shard_size=limit)
    return {name: value.clone() for name, value in model.state_dict().items()}


HOST = {"params": "host", "optimizer": "host"}
DISK = {"params": "disk", "optimizer": "disk"}
FP32 = {"compute_dtype": torch.float32}
CASES = [
    *((kind, 1, FP32, torch.float32) for kind in KINDS),
    *((kind, 2, HOST, torch.float32) for kind in KINDS),
    ("llama", 1, DISK, torch.float32),
    ("llama", 2, DISK | FP32, torch.float32),
    ("llama", 2, {"stage": 0}, torch.bfloat16),
    ("llama", 2, {"stage": 1} | FP32, torch.float32),
    ("qwen3_moe", 1, HOST, torch.bfloat16),
    ("mixtral", 2, {"stage": 0} | DISK, torch.float32),
    ("qwen3_moe", 2, {"stage": 2, "compute_dtype": torch.float16}, torch.float32),
]


@pytest.mark.parametrize(("kind", "world", "options", "dtype"), CASES, ids=lambda value: str(value).replace("torch.", ""))
def test_every_tensor_is_equal_after_a_step_and_both_ways(ranks, saved, tmp_path, kind, world, options, dtype):
    options = options | ({"disk": str(tmp_path)} if "disk" in options.values() else {})
    limit = "20KB" if world == 2 else "5GB"
    out = tmp_path / "out"
    trained = ranks(world).run(there_and_back, kind, saved(kind), out, options, dtype, limit)[0]
    back = type(tiny(kind)).from_pretrained(out, dtype="auto")
    assert {value.dtype for value in back.state_dict().values()} == {dtype}
    assert_same(trained, back.state_dict())
    before = wanted_of(kind, saved(kind), dtype)
    assert any(not torch.equal(value, before[name]) for name, value in trained.items())


@pytest.mark.parametrize("kind", KINDS + ODD_KINDS)
def test_files_look_as_the_library_writes_them(saved, tmp_path, kind):
    model = unwall.from_pretrained(saved(kind), unwall.Plan(compute_dtype=torch.float32))
    assert_same(model.state_dict(), wanted_of(kind, saved(kind), torch.float32))
    unwall.export_weights(model, tmp_path)
    written, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path, saved(kind)))
    assert_same(written, wanted)
    assert {name: value.dtype for name, value in written.items()} == {name: value.dtype for name, value in wanted.items()}
    for name in ("config.json", "generation_config.json"):
        if (saved(kind) / name).exists() and kind in KINDS:  # a composed config also says the dtype of its parts afterwards
            assert json.loads((tmp_path / name).read_text()) == json.loads((saved(kind) / name).read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in saved(kind).iterdir())


def test_another_export_leaves_nothing_of_the_last_one(saved, tmp_path):
    model = unwall.from_pretrained(saved("llama"))
    unwall.export_weights(model, tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    unwall.export_weights(model, tmp_path, dtype=torch.bfloat16)
    assert sorted(path.name for path in tmp_path.glob("*model*")) == ["model.safetensors"]
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def pretrained_loss(kind, folder, options):
    model = unwall.from_pretrained(folder, unwall.Plan(**options))
    return loss_of(model, kind).item(), {name: value.cpu() for name, value in model.named_buffers()}


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_computes_what_the_library_computes(ranks, saved, kind):
    """Buffers that no file holds (rotary frequencies) have their values, too."""
    library = type(tiny(kind)).from_pretrained(saved(kind))
    for loss, buffers in ranks(2).run(pretrained_loss, kind, saved(kind), FP32):
        assert loss == pytest.approx(loss_of(library, kind).item(), rel=1e-6)
        assert_same(buffers, dict(library.named_buffers()))


def test_parameters_made_by_constructors_of_old_are_loaded(tmp_path):
    """``torch.FloatTensor(n)`` is on the CPU, also where a model is built on the meta device."""
    import transformers

    torch.manual_seed(7)
    config = transformers.XLNetConfig(vocab_size=96, d_model=32, n_layer=2, n_head=4, d_inner=48)
    plain = transformers.XLNetLMHeadModel(config)
    plain.save_pretrained(tmp_path)
    assert_same(unwall.from_pretrained(tmp_path).state_dict(), plain.state_dict())


def test_a_bare_backbone_and_a_model_with_a_head_load_each_other(saved, tmp_path):
    import transformers

    tiny("qwen3_moe").model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"does not hold lm_head\.weight"):
        model = unwall.from_pretrained(tmp_path, auto_class=transformers.AutoModelForCausalLM)
    found, wanted = model.state_dict(), tiny("qwen3_moe").state_dict()
    head = found.pop("lm_head.weight")
    assert 0.01 < head.std() < 0.03
    wanted.pop("lm_head.weight")
    assert_same(found, wanted)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no use for: lm_head")
        bare = unwall.from_pretrained(saved("qwen3_moe"), auto_class=transformers.AutoModel)
    assert_same(bare.state_dict(), {name.removeprefix("model."): value for name, value in wanted.items()})


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_head_that_no_file_holds_is_initialised_as_the_library_does_it(saved, tier):
    """What the head says of its layers counts, and not what the model says of any layer."""
    import transformers

    plan = unwall.Plan(params=tier, optimizer=tier)
    with pytest.warns(UserWarning, match="does not hold classification_head"):
        model = unwall.from_pretrained(saved("t5"), plan, auto_class=transformers.T5ForSequenceClassification)
    for layer in (model.classification_head.dense, model.classification_head.out_proj):
        assert layer.weight.std().item() == pytest.approx(32**-0.5, rel=0.2)
        assert not layer.bias.any()
    found, wanted = model.state_dict(), tiny("t5").state_dict()
    assert_same({name: found[name] for name in wanted if name in found}, {n: v for n, v in wanted.items() if n in found})


def test_config_fields_are_overridden_and_unknown_ones_refused(saved):
    model = unwall.from_pretrained(saved("llama"), dtype="bfloat16", attn_implementation="eager", rms_norm_eps=0.5)
    assert model.config.rms_norm_eps == 0.5
    assert model.config._attn_implementation == "eager"
    with pytest.raises(TypeError, match="has no hidden_sise"):
        unwall.from_pretrained(saved("llama"), hidden_sise=3)


def waiting(kind, folder, built):
    if built == "meta":
        with torch.device("meta"):
            model = type(tiny(kind))(tiny(kind).config)
    else:
        with unwall.init():
            model = tiny(kind)
    unwall.load_weights(model, folder)
    unwall.shard(model, unwall.Plan())
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("built", ["meta", "init"])
def test_a_model_without_memory_is_loaded_when_it_is_sharded(ranks, saved, built):
    found = ranks(2).run(waiting, "llama", saved("llama"), built)[0]
    assert_same(found, wanted_of("llama", saved("llama"), torch.float32))


def test_optimizer_states_and_other_parameters_are_left_alone(saved, tmp_path):
    model = unwall.shard(tiny("llama"), unwall.Plan(params="disk", optimizer="disk", disk=tmp_path))
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, "llama").backward()
    optimizer.step()
    states, before = optimizer.state_dict(), model.state_dict()
    part = {name: torch.full_like(value, 2.0) for name, value in before.items() if "layers.1.mlp" in name}
    torch.save(part, tmp_path / "part.pt")
    keys = unwall.load_weights(model, tmp_path / "part.pt", strict=False)
    assert set(keys.missing_keys) == before.keys() - part.keys()
    assert_same(model.state_dict(), before | part)
    after = optimizer.state_dict()
    for number, entry in states["state"].items():
        for name, value in entry.items():
            assert torch.equal(after["state"][number][name], value)


def test_a_plain_model_and_a_torch_file_load_by_name(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    net(torch.randn(8, 4))
    torch.save(net.state_dict(), tmp_path / "net.pt")
    other = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    for model in (other, unwall.shard(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)))):
        unwall.load_weights(model, tmp_path / "net.pt")
        assert_same(model.state_dict(), net.state_dict())
    unwall.export_weights(model, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), dict(net.state_dict()))


def bytes_read(folder, options):
    counted, kept = [], WeightFiles.read

    def read(self, name, start, into):
        counted.append(into.nbytes)
        kept(self, name, start, into)

    WeightFiles.read = read
    try:
        unwall.from_pretrained(folder, unwall.Plan(**options))
    finally:
        WeightFiles.read = kept
    return sum(counted)


@pytest.mark.parametrize("stage", [0, 3])
def test_every_byte_is_read_by_one_rank(ranks, saved, stage):
    there = sum(value.nbytes for value in load_file(saved("mixtral") / "model.safetensors").values())
    first, second = ranks(2).run(bytes_read, saved("mixtral"), {"stage": stage})
    assert first + second == there
    assert abs(first - second) < there // 4
