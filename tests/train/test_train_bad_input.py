"""What is wrong is said in one line that tells what to do; the command ends with 2, and without a stack trace."""

import errno
import json
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
from train_tools import make_jsonl, make_model, make_plan, make_tokenizer, run_process, small_machine, train_here
from typer.testing import CliRunner

from unwall.cli import app
from unwall.shards.collectives import Ranks
from unwall.train import command, launch, planning, signals
from unwall.train.errors import TrainError
from unwall.train.model import check_length


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    make_model(root / "model")
    make_jsonl(root / "data.jsonl", rows=12)
    make_plan(root / "plan.toml", "device")
    return root


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """The first command on a machine says that it measures it."""
    monkeypatch.setattr(planning, "machine_of", small_machine)


def said(place, *more, **options):
    """What the command prints to standard error, in this process."""
    given = {
        "model": place / "model",
        "data": place / "data.jsonl",
        "out": place / "out",
        "plan": place / "plan.toml",
    } | options
    arguments = [str(part) for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    result = CliRunner().invoke(app, ["train", "--steps", "1", "--seq", "32", "--batch", "1", *arguments, *map(str, more)])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    text = result.stderr.strip()
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "nowhere"}, "--model nowhere: no such directory"),
        ({"data": "missing.jsonl"}, "--data missing.jsonl: no such file"),
        ({"plan": "none.toml"}, "--plan none.toml: no such file"),
        ({"disk": "nowhere"}, "--disk nowhere: no such directory"),
        ({"schedule": "exp"}, "--schedule is one of cosine, linear, constant"),
        ({"states": "thin"}, "--states is exact or lean"),
        ({"batch": 3, "accumulate": 2}, "use a multiple of 2"),
        ({"lr": -1}, "--lr must be a number above 0"),
        ({"device_bytes": "lots"}, "--device-bytes: cannot read 'lots'"),
        ({"eval_every": 3}, "add --eval-data"),
        ({"seq": 10**9}, "far beyond them; use --seq 128"),
        ({"data": ""}, "--data is empty: give a path"),
        ({"seed": 2**70}, "--seed is a number of at most 63 bits"),
        ({"nproc": 0}, "--nproc is 1 or more, got 0"),
        ({"lora_rank": 4}, "--lora-rank without --lora: add --lora"),
        ({"lora_targets": ""}, "--lora-targets is empty: give names of modules"),
    ],
)
def test_options(place, options, expected):
    assert expected in said(place, **options)


def test_data(place):
    for name, content, expected in [
        ("empty.jsonl", "", "no samples in it"),
        ("blank.txt", " \n", "none of 1 samples can be used"),
        ("none.jsonl", "{\n{\n", "none of 2 samples can be used: "),
        ("other.csv", "a,b", "data is .txt, .jsonl, .parquet"),
        ("packed.jsonl.gz", "", "is compressed; unpack it first"),
        ("void.jsonl", '{"text": ""}\n' * 20, "none of 20 samples can be used: "),
    ]:
        (place / name).write_text(content)
        assert expected in said(place, data=place / name, out=place / f"out-{name}")
    assert "none of 20 samples" in said(place, "--eval-data", place / "void.jsonl", out=place / "out-eval")
    (place / "broken.jsonl").write_text('{"text": "good"}\n{"text"\n')
    assert "broken.jsonl:2: is not JSON" in said(place, "--strict", data=place / "broken.jsonl", out=place / "out-strict")


def test_configs_and_weights(place):
    for name, config, expected in [
        ("listed", "[1]", "its config is no JSON object"),
        ("cut", "{", "is not JSON"),
        ("wide", None, "its weights do not match its config: size mismatch for "),
    ]:
        shutil.copytree(place / "model", place / name)
        wider = json.dumps(json.loads((place / "model" / "config.json").read_text()) | {"hidden_size": 64})
        (place / name / "config.json").write_text(config or wider)
        assert expected in said(place, model=place / name, out=place / f"out-{name}")


def test_a_tokenizer_of_another_model(place):
    make_model(place / "small", vocab=100)
    assert "does not match the model: it has tokens up to 257, the model has 100" in said(place, model=place / "small")
    make_model(place / "bare", weights=False)
    assert "has a config but no weights" in said(place, model=place / "bare")
    make_tokenizer(place / "no chat", chat=False)
    (place / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    given = {"tokenizer": place / "no chat", "data": place / "chat.jsonl", "out": place / "out-chat"}
    assert "the tokenizer has no chat template" in said(place, **given)


def test_an_out_directory_of_something_else(place):
    (place / "foreign").mkdir()
    (place / "foreign" / "letter.txt").write_text("mine")
    assert "holds files that are not of a run (letter.txt)" in said(place, out=place / "foreign")
    given = {"model": str(place / "model"), "plan": str(place / "plan.toml"), "steps": 1, "seq": 32, "batch": 1}
    train_here(**given, data=place / "data.jsonl", out=place / "taken")
    assert "holds another run (--seed was 0, is 4)" in said(place, "--seed", 4, out=place / "taken")
    assert json.loads((place / "taken" / "run.json").read_text())["status"] == "finished"  # a refused start changes nothing
    with (place / "data.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert "data.jsonl changed since this run began" in said(place, "--steps", 2, out=place / "taken")


def test_a_full_disk_leaves_what_was_saved(place, monkeypatch):
    from unwall.train.saving import FullSaver

    def full(self, extra, *, block):
        raise OSError(errno.ENOSPC, "No space left on device: 3.0 GiB are missing", str(place / "full"))

    monkeypatch.setattr(FullSaver, "save", full)
    assert "No space left on device: 3.0 GiB are missing; make room" in said(place, out=place / "full")


def test_adapters_that_cannot_be_read(tmp_path):
    from unwall.train.saving import AdapterSaver

    (tmp_path / "adapters-000000004.pt").write_bytes(b"cut short")
    with pytest.raises(TrainError, match=r"adapters-000000004.pt cannot be read \(\w+\): remove it to go on"):
        AdapterSaver(tmp_path, None, 1, Ranks(None, "cpu")).load()


def test_adapters_for_modules_that_are_not_there(place):
    given = {"lora_targets": "q_proj,qproj", "out": place / "out-targets"}
    assert "no module is called qproj; linear ones are down_proj, gate_proj, " in said(place, "--lora", **given)
    given = {"model": str(place / "model"), "plan": str(place / "plan.toml"), "steps": 1, "seq": 32, "batch": 1}
    train_here(**given, data=place / "data.jsonl", out=place / "out-head", lora=True, lora_targets="q_proj,lm_head")
    assert (place / "out-head" / "adapter_model.safetensors").is_file()  # its logits exist then


def test_a_model_that_reads_in_both_directions(place):
    import transformers

    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=260)
    config.save_pretrained(place / "bert")
    (place / "bert" / "model.safetensors").write_bytes(b"")
    assert "bert reads in both directions" in said(place, model=place / "bert")
    assert "is a file of weights; give the directory" in said(place, model=place / "model" / "model.safetensors")


def test_a_damaged_checkpoint_says_how_to_go_on(place):
    given = {"model": place / "model", "plan": place / "plan.toml", "seq": 32, "batch": 1, "save_every": 1}
    make_jsonl(place / "other.jsonl", rows=12)
    train_here(**given, data=place / "other.jsonl", out=place / "damaged", steps=2)
    newest = place / "damaged" / "checkpoints" / "checkpoint-000002"
    (newest / "manifest.json").write_text("{")
    more = {"data": place / "other.jsonl", "out": place / "damaged"}
    assert f"remove {newest} to go on from the checkpoint before it" in said(place, "--steps", 3, "--save-every", 1, **more)
    shutil.rmtree(place / "damaged" / "checkpoints" / "checkpoint-000001")  # now there is none before it
    assert "remove" not in said(place, "--steps", 3, "--save-every", 1, **more)


def test_sigterm_before_the_first_step_is_said(place, monkeypatch):
    def told(*_):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)  # what the interpreter does

    monkeypatch.setattr(command, "decide", told)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    paths = {"model": "model", "data": "data.jsonl", "out": "out-term", "plan": "plan.toml"}
    given = [str(part) for name, file in paths.items() for part in (f"--{name}", place / file)]
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        result = CliRunner().invoke(app, ["train", "--seq", "64", *given])
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        monkeypatch.setenv("WORLD_SIZE", "2")  # a rank that waits for another inside torch would not hear of it
        with signals.terminating():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result.exit_code == 143
    assert result.stderr.strip() == "unwall: SIGTERM; what was saved last stays, and the same command goes on from there"


@pytest.mark.parametrize("becomes", ["an error", "nothing"])
def test_ctrl_c_ends_the_command_whatever_an_import_makes_of_it(place, monkeypatch, becomes):
    def imports(*_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if becomes == "an error":
                raise ImportError("a module is half there") from None
        return tokenizer(*_)

    tokenizer = command.load_tokenizer
    monkeypatch.setattr(command, "load_tokenizer", imports)
    paths = {"model": "model", "data": "data.jsonl", "out": f"out-{len(becomes)}", "plan": "plan.toml"}
    given = [str(part) for name, file in paths.items() for part in (f"--{name}", place / file)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell has begun us with &
    try:
        result = CliRunner().invoke(app, ["train", "--seq", "64", *given])
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert result.stderr.strip() == "unwall: interrupted; what was saved last stays, and the same command goes on from there"
    assert "is saved" not in result.stdout
    if becomes == "nothing":  # it came to the first step
        assert json.loads((place / "out-7" / "run.json").read_text())["status"] == "interrupted"


def test_two_launchers(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainError, match="leave --nproc out"):
        launch.check_launcher(2)


def test_several_files_after_one_option():
    given = ["train", "--data", "a", "b", "--lora", "--eval-data", "c", "--data", "d", "--out", "x"]
    spread = launch.spread(given, ("--data", "--eval-data"))
    assert spread == ["train", "--data", "a", "--data", "b", "--lora", "--eval-data", "c", "--data", "d", "--out", "x"]


def test_a_plan_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('stage = 2\ncompute_dtype = "bf16"\nhost_bytes = "4GiB"\n')
    assert planning.read_plan(path)["stage"] == 2
    for content, expected in [("speed = 9", "speed is no field of a plan"), ("stage = ", "cannot be read as TOML")]:
        path.write_text(content)
        with pytest.raises(TrainError, match=expected):
            planning.read_plan(path)


def test_a_plan_file_that_says_nonsense_is_named(place):
    for content, expected in [
        ("passes = 'two'", "passes is a whole number above 0"),
        ("params = 'moon'", "params is one of"),
        ("disk = 5", "disk is a directory, or a tuple of several, got 5"),
        ("disk = []\nparams = 'disk'", "a state is placed on disk, but no directory is given"),
        ("disk = 'nowhere'", "disk nowhere: no such directory; make it"),
    ]:
        (place / "odd.toml").write_text(content)
        assert f"--plan {place / 'odd.toml'}: {expected}" in said(place, plan=place / "odd.toml", out=place / "out-odd")


def test_a_plan_whose_device_is_filled_by_activations_says_so(place):
    (place / "small.toml").write_text('device_bytes = "20KiB"')
    paths = {"model": place / "model", "data": place / "data.jsonl", "out": place / "out-small", "plan": place / "small.toml"}
    given = [str(part) for name, file in paths.items() for part in (f"--{name}", file)]
    result = CliRunner().invoke(app, ["train", "--steps", "1", "--seq", "32", "--batch", "1", *given])
    assert re.search(r"no prediction: activations are estimated at [\d.]+ KiB of the device's 20.0 KiB; it may", result.stdout)
    assert "the plan does not fit" in result.stderr


@pytest.mark.drill
def test_processes_that_fail_say_it_once(place):
    (place / "void.jsonl").write_text("\n")
    given = {"model": place / "model", "data": place / "void.jsonl", "out": place / "void", "plan": place / "plan.toml"}
    result = run_process(**given, steps=1, seq=32, batch=2, nproc=2)
    assert result.returncode == 2
    assert result.stderr.count("none of 1 samples can be used") == 1
    assert "Traceback" not in result.stderr


def test_sequences_beyond_the_positions_of_a_model(capsys):
    asked = SimpleNamespace(seq=128, model="model")
    with pytest.raises(TrainError, match="longer than the 64 positions of model, which are learned; use --seq 64 or less"):
        check_length(asked, SimpleNamespace(max_position_embeddings=64), 0)
    check_length(asked, SimpleNamespace(max_position_embeddings=128), 0)
    assert capsys.readouterr().err == ""
    check_length(asked, SimpleNamespace(max_position_embeddings=64, rope_parameters={"rope_theta": 1e4}), 0)
    assert "--seq 128: longer than the 64 positions of model" in capsys.readouterr().err
