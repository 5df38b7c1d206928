"""The words in which a checkpoint is written: boxes, manifests, and what is refused."""

import itertools
import json

import pytest
import torch

from unwall.checkpoint.boxes import Box, Part, overlaps, uncovered
from unwall.checkpoint.checksums import checked_runs, crc
from unwall.checkpoint.errors import CheckpointError
from unwall.checkpoint.manifest import FileEntry, Manifest, OptimizerEntry, Piece, Tensor, dumps, loads, merged
from unwall.checkpoint.validation import check_manifest


def elements(shape, part):
    """The elements of a part, as numbers in the whole tensor, in the part's order."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for dimension, (offset, size) in enumerate(zip(part.box.offsets, part.box.sizes, strict=True)):
        whole = whole.narrow(dimension, offset, size)
    return whole.reshape(-1)[part.start : part.end].tolist()


def boxes_of(shape):
    spans = [[(low, high - low) for low in range(n) for high in range(low + 1, n + 1)] for n in shape]
    return [Box(tuple(s[0] for s in chosen), tuple(s[1] for s in chosen)) for chosen in itertools.product(*spans)]


def parts_of(shape):
    return [
        Part(box, start, end - start)
        for box in boxes_of(shape)
        for start in range(box.numel)
        for end in range(start + 1, box.numel + 1)
    ]


@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 2, 2)])
def test_two_parts_share_the_elements_that_both_hold(shape):
    parts = parts_of(shape)
    for first, second in itertools.product(parts[::2], parts[::3]):
        mine, other = elements(shape, first), elements(shape, second)
        found = []
        for run in overlaps(first, second):
            assert mine[run.first : run.first + run.numel] == other[run.second : run.second + run.numel]
            found += mine[run.first : run.first + run.numel]
        assert sorted(found) == sorted(set(mine) & set(other))


def test_what_no_part_holds_is_counted_and_an_overlap_is_refused():
    halves = [Part(Box((0, 0), (4, 2)), 0, 8), Part(Box((0, 2), (4, 2)), 0, 5)]
    assert uncovered((4, 4), halves) == 3
    with pytest.raises(ValueError, match="overlap"):
        uncovered((4, 4), [Part.whole((4, 4)), Part(Box((1, 1), (1, 1)), 0, 1)])
    with pytest.raises(ValueError, match="overlap"):
        uncovered((4,), [Part(Box.whole((4,)), 0, 3), Part(Box.whole((4,)), 2, 2)])


def test_every_checked_run_ends_with_its_block():
    assert list(checked_runs(5, 12, block_bytes=8)) == [(5, 3), (8, 8), (16, 1)]
    assert list(checked_runs(8, 0, block_bytes=8)) == []


def piece(start, numel, file="rank-00000.safetensors", offset=4096):
    return Piece(Part(Box.whole((4, 2)), start, numel), file, offset, (7,))


def example(**changes):
    tensors = (
        Tensor("param", "a.weight", torch.float32, (4, 2), (piece(0, 8),), given=torch.bfloat16, aliases=("b.weight",)),
        Tensor("state", "a.weight", torch.float32, (4, 2), (piece(0, 8, offset=4128),), state="exp_avg"),
        Tensor("value", "extra.1", torch.uint8, (), (Piece(Part.whole(()), "rank-00000.safetensors", 4160, (1,)),), rank=0),
    )
    fields = {
        "world_size": 1,
        "step": 3,
        "files": {"rank-00000.safetensors": FileEntry(4161, 4096, 5)},
        "tensors": tensors,
        "optimizer": OptimizerEntry("AdamW", ((("a.weight",), {"lr": 0.1}),), {"a.weight": {"step": 3}}, {"scale": 1.0}),
        "ranks": ({"rng": None},),
        "plan": "Plan()",
        "saved_at": "now",
        "versions": {"unwall": "1"},
    }
    return Manifest(**{**fields, **changes})


def test_a_manifest_survives_json():
    manifest = example()
    check_manifest(manifest, "here")
    assert loads(dumps(manifest), "here") == manifest


def test_the_parts_of_several_ranks_become_one():
    tensor = example().tensors[0]
    halves = [
        Manifest(
            2, 3, {f: FileEntry(9999, 8, 1)}, (Tensor("param", "w", tensor.dtype, (4, 2), (piece(at, 4, f),)),), ranks=(at,)
        )
        for at, f in ((0, "a"), (4, "b"))
    ]
    whole = merged(halves)
    check_manifest(whole, "here")
    assert [p.file for p in whole.tensors[0].pieces] == ["a", "b"]
    assert whole.ranks == (0, 4)
    with pytest.raises(CheckpointError, match="param w is not complete, 4 of its elements"):
        check_manifest(halves[0], "here")


def test_a_damaged_manifest_is_refused():
    data = dumps(example())
    for wrong in (b"", b"{}", b"[1]", data[:-9], data.replace(b"a.weight", b"c.weight", 1), b"\xff" + data):
        with pytest.raises(CheckpointError, match="somewhere"):
            loads(wrong, "somewhere")
    newer = json.dumps({"format": "unwall checkpoint", "version": 99}, separators=(",", ":"))
    with pytest.raises(CheckpointError, match="use a newer unwall"):
        loads(f'{{"crc32":"{crc(newer.encode()):08x}","manifest":{newer}}}\n'.encode(), "somewhere")


@pytest.mark.parametrize("name", ["../rank-00000.safetensors", "/etc/passwd", "..", "a/b", ""])
def test_a_file_outside_of_the_checkpoint_is_refused(name):
    with pytest.raises(CheckpointError, match="not a file beside it"):
        check_manifest(example(files={name: FileEntry(10, 5, 1)}, tensors=()), "here")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (piece(0, 9), "is no part of param w"),
        (piece(-1, 2), "is no part of param w"),
        (piece(0, 8, offset=0), "param w is said to be at byte 0"),
        (piece(0, 8, offset=4150), "param w is said to be at byte 4150"),
        (Piece(Part(Box.whole((4, 2)), 0, 8), "rank-00000.safetensors", 4096, ()), "param w in rank-00000.safetensors has 0"),
    ],
)
def test_a_piece_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(CheckpointError, match=message):
        check_manifest(example(tensors=(Tensor("param", "w", torch.float32, (4, 2), (wrong,)),)), "here")
