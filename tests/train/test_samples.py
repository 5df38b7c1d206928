"""Files, order, tokens and packing: the same samples whatever the number of ranks, each of them once per epoch."""

import json
from itertools import pairwise

import pytest
import torch
from train_tools import make_jsonl, make_model, make_tokenizer

from unwall.train import counting
from unwall.train.batches import Packer, my_lanes
from unwall.train.counting import Counting
from unwall.train.data import open_data
from unwall.train.errors import TrainError
from unwall.train.files import PIECE_BYTES, find_files, make_index
from unwall.train.order import Order, Permutation
from unwall.train.packing import IGNORED, to_tensors
from unwall.train.tokens import Encoder
from unwall.train.world import join_world


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def opened(tokenizer, folder, *names, strict=False):
    files = find_files(tuple(map(str, names)))
    for path in files:
        make_index(path, folder / "index")
    return open_data(files, folder / "index", Encoder(tokenizer), strict)


def test_every_epoch_is_another_permutation():
    for size in (1, 2, 5, 97):
        assert sorted(Permutation(size, 3)[index] for index in range(size)) == list(range(size))
    order = Order([40, 0, 57], [0, 0, 0], seed=1)
    epochs = [[order.sample(position) for position in range(97 * e, 97 * (e + 1))] for e in range(2)]
    assert all(sorted(epoch) == list(range(97)) for epoch in epochs)
    assert epochs[0] != epochs[1] != list(range(97))
    assert epochs[0] != [Order([40, 0, 57], [0, 0, 0], seed=2).sample(position) for position in range(97)]


def test_row_groups_are_read_a_window_at_a_time():
    order = Order([10] * 8, [100] * 8, seed=1, window_bytes=200)
    read = [order.sample(position) // 10 for position in range(80)]
    assert sorted(order.sample(position) for position in range(80)) == list(range(80))
    assert all(len(set(read[start : start + 20])) == 2 for start in range(0, 80, 20))
    assert read != sorted(read)


def test_text_is_cut_at_line_ends_and_between_characters(tokenizer, tmp_path):
    lines, stream = "word ä€😀\n" * 3000, "ä€😀" * 12000
    (tmp_path / "lines.txt").write_text(lines)
    (tmp_path / "stream.txt").write_text(stream)
    data = opened(tokenizer, tmp_path, tmp_path / "lines.txt", tmp_path / "stream.txt")
    rows = [file.read(row)["text"] for file in data._files for row in range(file.rows)]
    assert "".join(rows) == lines + stream
    assert all(len(row.encode()) >= PIECE_BYTES for row in rows[: data._files[0].rows - 1])
    assert all(row.endswith("\n") for row in rows[: data._files[0].rows])


def test_every_kind_of_file_holds_the_same_samples(tokenizer, tmp_path):
    pyarrow, datasets = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("datasets")
    rows = [{"text": f"sample {number} " * (number % 5 + 1)} for number in range(23)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "saved")
    pyarrow.write_table(table.data.table, tmp_path / "a.parquet", row_group_size=4)
    found = []
    for name in ("a.jsonl", "a.parquet", "saved"):
        data = opened(tokenizer, tmp_path, tmp_path / name)
        assert data.size == 23
        found.append([data.read(sample).ids for sample in range(23)])
    assert found[0] == found[1] == found[2]


def test_only_answers_count(tokenizer, tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = [
        {"prompt": "ask ", "completion": "say"},
        {"messages": [*chat, {"role": "user", "content": "and"}, {"role": "assistant", "content": "no"}]},
        {"prompt": chat[:1], "completion": chat[1:]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = opened(tokenizer, tmp_path, tmp_path / "a.jsonl")
    answers = []
    for sample in range(3):
        document = data.read(sample)
        kept = [token for token, counts in zip(document.ids, document.answers, strict=True) if counts]
        answers.append(tokenizer.decode(kept))
    assert answers == ["say<eos>", "yes<eos>no<eos>", "yes<eos>"]


def test_a_broken_line_is_skipped_and_named_or_fatal(tokenizer, tmp_path):
    lines = [
        '{"text": "good one"}',
        '{"text": broken',
        "",
        '{"other": 1}',
        "[1]",
        '{"text": "good two"}',
        '{"text": "\\ud800"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    data = opened(tokenizer, tmp_path, tmp_path / "a.jsonl")
    assert [data.read(sample) is not None for sample in range(7)] == [True, False, False, False, False, True, False]
    assert [said.partition(": ")[0].rpartition(":")[2] for said in data.broken.values()] == ["2", "4", "5", "7"]
    assert "half a character, '\\ud800' at 0" in data.broken[6]
    strict = opened(tokenizer, tmp_path, tmp_path / "a.jsonl", strict=True)
    with pytest.raises(TrainError, match=r"a\.jsonl:2: is not JSON.*--strict"):
        strict.read(1)


def test_what_the_run_writes_is_no_data(tmp_path):
    """``--data . --out run``: the same command, given again, finds the same files."""
    first = make_jsonl(tmp_path / "a.jsonl", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("{}\n")
    for given in (str(tmp_path), str(tmp_path / "**" / "*.jsonl")):
        assert find_files((given,), out=str(tmp_path / "run")) == [first]
    assert find_files((str(tmp_path / "*"),), out=str(tmp_path / "run")) == [first]


def test_samples_are_looked_at_until_one_can_be_used(tokenizer, tmp_path):
    """A file that begins with what cannot be used is no reason to refuse it all."""
    (tmp_path / "a.jsonl").write_text("{\n" * 20 + '{"text": "good"}\n' * 20)
    opened(tokenizer, tmp_path, tmp_path / "a.jsonl").look()
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n' * 20 + '{"text": "good"}\n')
    opened(tokenizer, tmp_path, tmp_path / "b.jsonl").look()


def test_a_sample_whose_answer_no_sequence_reaches_is_skipped_and_named(tokenizer, tmp_path):
    """It would be a sequence without a loss: a run of such samples would learn nothing, and say so nowhere."""
    long = {"prompt": "x" * 60, "completion": "never reached"}
    just = {"prompt": "x" * 46, "completion": "one token is"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (long, just)))
    make_index(tmp_path / "a.jsonl", tmp_path / "index")
    data = open_data([tmp_path / "a.jsonl"], tmp_path / "index", Encoder(tokenizer), False, length=47)
    assert [data.read(sample) is not None for sample in range(2)] == [False, True]
    assert data.broken == {
        0: f"{tmp_path / 'a.jsonl'}:1: its answer begins behind 60 tokens, a sequence ends at 47: use a longer --seq"
    }


def sequences(data, order, ranks, steps, states=None, lanes=4, limit=None):
    """What all ranks together see: by step, by lane."""
    packers = [Packer(data, order, my_lanes(lanes, rank, ranks, states, limit), 48, 0) for rank in range(ranks)]
    seen, behind = [], []
    for _ in range(steps):
        batches = [packer.step() for packer in packers]
        seen.append([(each.ids, each.labels, each.positions) for batch in batches for each in batch.sequences])
        behind.append([lane for batch in batches for lane in batch.lanes])
    return seen, behind


def test_the_number_of_ranks_and_a_stop_change_nothing(tokenizer, tmp_path):
    data = opened(tokenizer, tmp_path, make_jsonl(tmp_path / "a.jsonl"))
    order = data.order(3)
    alone, behind = sequences(data, order, 1, 12)
    assert sequences(data, order, 2, 12)[0] == alone
    assert sequences(data, order, 4, 7, behind[4])[0] == alone[5:]


def count_steps(data, order, folder, lanes, alone=False):
    return Counting(data, folder / "index", join_world(), "key").steps(order, lanes, 48, data.size, alone)


def test_counting_that_takes_long_says_so_once(tokenizer, tmp_path, monkeypatch, capsys):
    data = opened(tokenizer, tmp_path, make_jsonl(tmp_path / "a.jsonl", 6))
    monkeypatch.setattr(counting, "QUIET_S", 0.0)
    steps = count_steps(data, data.order(3), tmp_path, 2)
    assert capsys.readouterr().out.splitlines() == ["counting the tokens of 6 samples, once: it says how many steps there are"]
    assert count_steps(data, data.order(3), tmp_path, 2) == steps
    assert capsys.readouterr().out == ""


def test_a_tokenizer_that_panics_while_samples_are_counted(tokenizer, tmp_path, monkeypatch):
    """What a tokenizer raises then is no Exception. Nothing is remembered of such a count."""

    class Panic(BaseException):
        pass

    data = opened(tokenizer, tmp_path, make_jsonl(tmp_path / "a.jsonl", 6))
    read = data.read
    with monkeypatch.context() as broken:
        broken.setattr(data, "read", lambda sample: read(sample) if sample < 3 else (_ for _ in ()).throw(Panic("no room")))
        with pytest.raises(RuntimeError, match="Panic while samples were counted: no room"):
            count_steps(data, data.order(3), tmp_path, 2)
    assert count_steps(data, data.order(3), tmp_path, 2) > 0


def test_every_token_of_an_epoch_is_predicted_once(tokenizer, tmp_path):
    data = opened(tokenizer, tmp_path, make_jsonl(tmp_path / "a.jsonl"))
    order = data.order(3)
    steps = count_steps(data, order, tmp_path, 4)
    seen, _ = sequences(data, order, 1, steps + 1, limit=data.size)
    assert any(any(label != IGNORED for label in labels) for _, labels, _ in seen[steps - 1])
    assert all(label == IGNORED for _, labels, _ in seen[steps] for label in labels)
    expected = 0
    for sample in range(data.size):
        document = data.read(sample)
        expected += len(document.ids) - 1 if document.answers is None else sum(document.answers[1:48])
    assert sum(label != IGNORED for step in seen for _, labels, _ in step for label in labels) == expected


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_do_not_attend_to_each_other(kind, attention, tmp_path):
    """A packed sequence has the sum of the losses that its samples have alone."""
    import transformers

    folder = make_model(tmp_path / "model", kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    data = opened(tokenizer, tmp_path, make_jsonl(tmp_path / "a.jsonl"))
    packed = Packer(data, data.order(1), my_lanes(2, 0, 1, None, None), 96, 0).step().sequences
    with torch.no_grad():
        together = model(**to_tensors(packed, torch.device("cpu")), use_cache=False, num_items_in_batch=1).loss
        apart = 0.0
        for each in packed:
            starts = [place for place, position in enumerate(each.positions) if position == 0] + [len(each.ids)]
            assert len(starts) > 2
            for start, end in pairwise(starts):
                ids, labels = torch.tensor([each.ids[start:end]]), torch.tensor([each.labels[start:end]])
                if (labels != IGNORED).any():
                    apart += float(model(input_ids=ids, labels=labels, num_items_in_batch=1).loss)
    assert float(together) == pytest.approx(apart, rel=1e-5)
