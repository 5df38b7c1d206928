"""Matches of a box are those matches of the whole tensor that lie in it."""

import itertools
import random

from unwall.checkpoint.boxed import within
from unwall.checkpoint.boxes import Box
from unwall.checkpoint.patchwork import Patchwork


def elements(match):
    """Near and far, element by element."""
    for index in itertools.product(*map(range, match.extents)):
        near = sum(at * stride for at, stride in zip(index, match.near_strides, strict=True))
        far = sum(at * stride for at, stride in zip(index, match.far_strides, strict=True))
        yield match.near_start + near, match.far_start + far


def mixed(source, shuffled):
    """A tensor made of another one by transposing and reshaping it."""
    for _ in range(shuffled.randint(0, 3)):
        if source.ndim > 1 and shuffled.random() < 0.5:
            source = source.transpose(*shuffled.sample(range(source.ndim), 2))
        else:
            rows = shuffled.choice([rows for rows in range(1, source.numel() + 1) if source.numel() % rows == 0])
            source = source.reshape(rows, source.numel() // rows)
    return source


def check(matches, shape, shuffled):
    offsets = [shuffled.randrange(size) for size in shape]
    sizes = [shuffled.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True)]
    box, known = Box(tuple(offsets), tuple(sizes)), dict(pair for match in matches for pair in elements(match))
    whole, expected = Box.whole(shape), {}
    for index in itertools.product(*(range(low, low + size) for low, size in zip(offsets, sizes, strict=True))):
        expected[box.position(index)] = known[whole.position(index)]
    found = [pair for match in matches for part in within(match, shape, box) for pair in elements(part)]
    assert len(found) == len(expected)
    assert dict(found) == expected


def test_boxes_of_tensors_that_are_made_of_others():
    shuffled = random.Random(0)
    for _ in range(400):
        shape = [shuffled.randint(1, 6) for _ in range(shuffled.randint(1, 4))]
        made = mixed(Patchwork.whole("there", shape), shuffled)
        check(made.matches(), tuple(made.shape), shuffled)
        check([match.turned("here") for match in made.matches()], tuple(shape), shuffled)
