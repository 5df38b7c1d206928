"""Files that are damaged, lie or belong to another model: one error that names file and tensor, and nothing has changed."""

import itertools
import json
import os

import pytest
import torch
from ranks import rank_and_world
from safetensors.torch import save_file
from torch import nn

import unwall
from unwall.checkpoint.offline import export_checkpoint
from unwall.checkpoint.weight_files import WeightFiles


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def other_weights():
    torch.manual_seed(1)
    return {name: torch.randn_like(value) for name, value in net().state_dict().items()}


@pytest.fixture
def model():
    return unwall.shard(net(), unwall.Plan(compute_dtype=torch.float32))


def refuses(model, path, match, kind=(ValueError, RuntimeError, OSError), **options):
    with pytest.raises(kind, match=match):
        unwall.load_weights(model, path, **options)
    for name, value in net().state_dict().items():
        assert torch.equal(model.state_dict()[name], value), f"{name} has changed"


def header_of(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_missing_and_empty(model, tmp_path):
    refuses(model, tmp_path / "nothing", r"no weights at .*nothing.*snapshot_download", FileNotFoundError)
    refuses(model, tmp_path, r"neither model\.safetensors", FileNotFoundError)
    (tmp_path / "model.safetensors").write_bytes(b"")
    refuses(model, tmp_path, r"model\.safetensors is no safetensors file")


@pytest.mark.parametrize("length", [4, 20, 200, -1])
def test_a_file_that_was_cut_off(model, tmp_path, length):
    path = tmp_path / "model.safetensors"
    save_file(other_weights(), path)
    path.write_bytes(path.read_bytes()[:length])
    refuses(model, tmp_path, r"model\.safetensors")


LIES = {
    "an offset outside of the file": ({"data_offsets": [1 << 40, (1 << 40) + 256]}, r"'0\.weight'.*file has .* bytes"),
    "a negative offset": ({"data_offsets": [-256, 0]}, r"'0\.weight'.*offsets"),
    "fewer bytes than the shape": ({"data_offsets": [0, 8]}, r"'0\.weight'.*takes 256 bytes.*gives it 8"),
    "an unknown dtype": ({"dtype": "F7"}, r"'0\.weight' has dtype 'F7'"),
    "no shape": ({"shape": None}, r"'0\.weight' has no dtype, shape"),
    "a shape that overflows": ({"shape": [1 << 62, 1 << 62]}, r"'0\.weight'.*takes"),
    "another tensor's bytes": ({"data_offsets": [16, 272]}, r"'0\..*' overlap"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(model, tmp_path, lie):
    path = tmp_path / "model.safetensors"
    save_file(other_weights(), path)
    header, data = header_of(path)
    changes, match = LIES[lie]
    header["0.weight"] |= changes
    with_header(path, header, data)
    refuses(model, path, match)


def test_a_header_that_is_no_table(model, tmp_path):
    path = tmp_path / "model.safetensors"
    for text in (b"not json", b"[1, 2]", b'{"0.weight": 3}'):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        refuses(model, path, r"model\.safetensors")


def test_an_index_that_leads_out_of_its_directory_or_nowhere(model, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file(other_weights(), tmp_path / "outside.safetensors")
    save_file(other_weights(), inside / "there.safetensors")
    index = inside / "model.safetensors.index.json"
    for file, match in (
        ("../outside.safetensors", r"puts '0\.weight' into '\.\./outside"),
        (str(tmp_path / "outside.safetensors"), r"beside the index"),
        ("missing.safetensors", r"puts '0\.weight' into missing\.safetensors, which is not"),
    ):
        index.write_text(json.dumps({"weight_map": {"0.weight": file}}))
        refuses(model, inside, match)
    index.write_text(json.dumps({"weight_map": {"nowhere": "there.safetensors"}}))
    refuses(model, inside, r"'nowhere' into there\.safetensors, but that file has no such tensor")
    index.write_text("[]")
    refuses(model, inside, "is no index")


def test_names_shapes_and_dtypes_are_reported_as_load_state_dict_does(model, tmp_path):
    path = tmp_path / "model.safetensors"
    weights = other_weights()
    weights["2.weight"] = weights.pop("1.weight")
    save_file(weights, path)
    refuses(model, path, r'(?s)Missing key\(s\).*"1\.weight".*Unexpected key\(s\).*"2\.weight"', RuntimeError)
    keys = unwall.load_weights(unwall.shard(net()), path, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["1.weight"], ["2.weight"])

    save_file(other_weights() | {"0.bias": torch.zeros(9)}, path)
    for strict in (True, False):
        match = r"size mismatch for 0\.bias: \[9\] .*model\.safetensors.*\[8\] in the model"
        refuses(model, path, match, RuntimeError, strict=strict)
    save_file(other_weights() | {"0.bias": torch.zeros(8, dtype=torch.int64)}, path)
    refuses(model, path, r"dtype mismatch for 0\.bias: model\.safetensors has 0\.bias of int64", RuntimeError)


def test_pickles_are_never_run(model, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save({"0.weight": Bomb()}, tmp_path / "bomb.pt")
    refuses(model, tmp_path / "bomb.pt", r"bomb\.pt cannot be read as weights alone")
    assert not (tmp_path / "exploded").exists()
    torch.save({"model": net().state_dict(), "step": 3}, tmp_path / "nested.pt")
    refuses(model, tmp_path / "nested.pt", r"'model' is a OrderedDict, not a tensor: save model\.state_dict\(\) alone")


def test_other_programs_checkpoints_are_named_with_the_command_that_converts_them(model, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp.save(net().state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    refuses(model, tmp_path / "dcp", r"DCP.*format_utils dcp_to_torch")
    step = tmp_path / "deepspeed" / "global_step10"
    step.mkdir(parents=True)
    (step / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"")
    refuses(model, tmp_path / "deepspeed", r"DeepSpeed ZeRO.*deepspeed/zero_to_fp32\.py .*deepspeed OUT")
    refuses(model, step, r"deepspeed/zero_to_fp32\.py .*deepspeed OUT")
    for folder in ("dcp", "deepspeed"):
        with pytest.raises(unwall.CheckpointError, match=r"convert it with .* and give load_weights"):
            unwall.load(tmp_path / folder, model)
    unwall.save(tmp_path / "ours", model)
    refuses(model, tmp_path / "ours", r"checkpoints of unwall\.save.*unwall export")
    dcp.save(other_weights(), checkpoint_id=tmp_path / "other", no_dist=True)
    dcp_to_torch_save(tmp_path / "other", tmp_path / "weights.pt")
    unwall.load_weights(model, tmp_path / "weights.pt")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other_weights().items())


def one_rank_cannot_read(folder):
    model = unwall.shard(net(), unwall.Plan(stage=0))
    if rank_and_world()[0] == 1:

        def broken(self, name, start, into):
            raise OSError(5, "the drive is gone", str(folder))

        WeightFiles.read, kept = broken, WeightFiles.read
    try:
        unwall.load_weights(model, folder)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if rank_and_world()[0] == 1:
            WeightFiles.read = kept
    return "loaded"


def missing_on_one(folder):
    path = folder if rank_and_world()[0] == 0 else folder / "elsewhere"
    model = unwall.shard(net())
    try:
        unwall.load_weights(model, path)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_what_fails_on_one_rank_fails_on_all(ranks, tmp_path):
    save_file(other_weights(), tmp_path / "model.safetensors")
    first, second = ranks(2).run(one_rank_cannot_read, tmp_path)
    assert "the drive is gone" in second
    assert "failed on rank 1: OSError" in first
    first, second = ranks(2).run(missing_on_one, tmp_path)
    assert "FileNotFoundError: there are no weights" in second
    assert "failed on rank 1: FileNotFoundError" in first


def test_an_export_that_fails_leaves_nothing_and_keeps_what_was_there(model, tmp_path, monkeypatch):
    unwall.export_weights(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(OSError, match="no space left"):
        unwall.export_weights(model, tmp_path)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_an_export_over_an_older_one_that_is_interrupted_mixes_nothing(model, tmp_path, monkeypatch):
    """Files of both have the same names: an index of the old ones would make a model of both."""
    unwall.export_weights(model, tmp_path, max_shard_size=100)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    replace, turns = os.replace, itertools.count()

    def interrupted(*paths):
        if next(turns):
            raise OSError(5, "interrupted")
        replace(*paths)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(OSError, match="interrupted"):
        unwall.export_weights(model, tmp_path, max_shard_size=100)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="has neither"):
        unwall.load_weights(model, tmp_path)
    unwall.export_weights(model, tmp_path, max_shard_size=100)
    unwall.load_weights(model, tmp_path)


def test_weights_are_not_loaded_into_what_is_lent(model, tmp_path):
    save_file(other_weights(), tmp_path / "model.safetensors")
    with unwall.full_params(model), pytest.raises(RuntimeError, match="leave the context first"):
        unwall.load_weights(model, tmp_path)
    with pytest.raises(RuntimeError, match="not sharded"):
        unwall.export_weights(net(), tmp_path)


def test_a_name_that_files_keep_for_themselves(tmp_path):
    """The files would hold it as something else: it would be missing, and nobody would know."""
    model = nn.Linear(4, 4)
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(3)))
    unwall.shard(model)
    with pytest.raises(ValueError, match="a tensor of the model is called __metadata__"):
        unwall.export_weights(model, tmp_path / "out")
    unwall.save(tmp_path / "saved", model)
    unwall.load(tmp_path / "saved", model)
    with pytest.raises(ValueError, match="a tensor of the model is called __metadata__"):
        export_checkpoint(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()
