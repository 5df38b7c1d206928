"""Patchworks against the tensors they stand for: random chains of the operations that conversions use."""

import itertools
import random

import pytest
import torch

from unwall.checkpoint.match import cut, far_pieces
from unwall.checkpoint.patchwork import Patchwork

SOURCES = {"a": (4, 6, 2), "b": (4, 6, 2), "c": (8, 6)}


def chain(rng: random.Random, a, b):
    """The same random operations on tensors or on patchworks."""
    x = rng.choice([torch.cat, torch.stack])([a, b], dim=rng.randrange(3))
    for _ in range(rng.randrange(1, 5)):
        kind = rng.choice(["transpose", "chunk", "unbind", "reshape", "split", "interleave"])
        dim = rng.randrange(x.ndim) if x.ndim else 0
        if x.ndim == 0:
            break
        if kind == "transpose":
            x = torch.transpose(x, dim, rng.randrange(x.ndim)).contiguous()
        elif kind == "chunk":
            x = rng.choice(torch.chunk(x, 2, dim=dim))
        elif kind == "unbind" and x.ndim > 2:
            x = rng.choice(torch.unbind(x, dim))
        elif kind == "reshape":
            x = x.reshape(-1, x.shape[-1]) if rng.random() < 0.5 else x.reshape(x.shape[0], -1)
        elif kind == "split" and x.shape[dim] % 2 == 0:
            shape = list(x.shape)
            x = x.contiguous().view(*shape[:dim], 2, shape[dim] // 2, *shape[dim + 1 :])
        elif kind == "interleave" and x.shape[dim] % 2 == 0:
            shape = list(x.shape)
            split = [*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :]]
            x = x.reshape(split).transpose(dim, dim + 1).reshape(shape)
        x = x.squeeze() if rng.random() < 0.1 else x
    return x


@pytest.mark.parametrize("seed", range(60))
def test_a_patchwork_knows_where_every_element_comes_from(seed):
    values = {"a": torch.arange(48).view(4, 6, 2), "b": torch.arange(100, 148).view(4, 6, 2)}
    wanted = chain(random.Random(seed), values["a"], values["b"])
    made = chain(random.Random(seed), *(Patchwork.whole(name, values[name].shape) for name in "ab"))
    assert tuple(made.shape) == tuple(wanted.shape)

    rng, flat = random.Random(seed), wanted.reshape(-1)
    borders = sorted({0, flat.numel(), *(rng.randrange(flat.numel() + 1) for _ in range(3))})
    found = torch.full_like(flat, -1)
    for low, high in itertools.pairwise(borders):
        for match in made.matches():
            for part in cut(match, low, high):
                assert low <= part.near_start
                assert part.near_start + part.near_span <= high
                for piece in far_pieces(part, 5):
                    assert piece.far_span <= 5
                    goal = found.as_strided(piece.extents, piece.near_strides, piece.near_start)
                    assert (goal == -1).all(), "an element comes twice"
                    source = values[piece.far].reshape(-1)
                    goal.copy_(source.as_strided(piece.extents, piece.far_strides, piece.far_start))
    assert torch.equal(found, flat)


@pytest.mark.parametrize("seed", range(20))
def test_turned_matches_go_the_other_way(seed):
    values = {"a": torch.arange(48).view(4, 6, 2), "b": torch.arange(100, 148).view(4, 6, 2)}
    wanted = chain(random.Random(seed), values["a"], values["b"]).reshape(-1)
    made = chain(random.Random(seed), *(Patchwork.whole(name, values[name].shape) for name in "ab"))
    found = torch.full_like(wanted, -1)
    for match in made.matches():
        for low, high in ((0, 13), (13, 48)):
            for part in cut(match.turned("made"), low, high):
                source = values[match.far].reshape(-1).as_strided(part.extents, part.near_strides, part.near_start)
                found.as_strided(part.extents, part.far_strides, part.far_start).copy_(source)
    assert torch.equal(found, wanted)


def test_what_cannot_be_done_piece_by_piece_is_refused():
    with pytest.raises(NotImplementedError, match="piece by piece"):
        torch.matmul(Patchwork.whole("a", (2, 2)), Patchwork.whole("b", (2, 2)))
