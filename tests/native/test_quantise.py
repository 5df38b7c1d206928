"""Blocks of small integers: the native kernels against the same arithmetic in torch, bit by bit, on every instruction set."""

import itertools

import pytest
import torch

from unwall.native.pool import WorkerPool, isa, select_isa
from unwall.native.quantise import quantise
from unwall.shards.compress import Codec
from unwall.shards.compress_torch import most_of, pack_blocks, unpack_blocks

N, PIECES = 1024, 3


def values_for(dtype):
    """Blocks of all sizes: large, tiny, below all numbers that count, zeros, and with what is not finite."""
    torch.manual_seed(0)
    values = torch.randn(PIECES * N // 256, 256) * torch.logspace(-3, 3, PIECES * N // 256)[:, None]
    values[1] = 0
    values[2] *= 1e-33
    values[3, 7], values[3, 8], values[3, 9] = float("inf"), float("-inf"), float("nan")
    values[4, 0], values[5, 255] = 6e4, -0.0
    return values.view(-1).to(dtype)


def packed_by_torch(values, bits, seed=None, residual=None):
    pieces = []
    for piece in range(PIECES):
        part, rest = values[piece * N :][:N], None if residual is None else residual[piece * N :][:N]
        scales, codes = torch.empty(N // 256), torch.empty(N * bits // 8, dtype=torch.uint8)
        pack_blocks(scales, codes, part, bits, piece * N, seed, rest)
        pieces += [scales.view(torch.uint8), codes]
    return torch.cat(pieces)


def same(first, second):
    return first.dtype is second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("each_isa")
def test_the_same_bits_as_torch(pool, dtype, bits):
    codec, values = Codec(bits, lambda: pool), values_for(dtype)
    for seed, feeds in itertools.product((None, 0, 0xDEADBEEF), (False, True)):
        expected_rest = torch.full_like(values, 0.25) if feeds else None
        expected = packed_by_torch(values, bits, seed, expected_rest)
        rest = torch.full_like(values, 0.25) if feeds else None
        packed = torch.empty(PIECES * codec.packed_bytes(N), dtype=torch.uint8)
        codec.pack(packed, values, PIECES, seed, rest)
        assert same(packed, expected)
        assert rest is None or (same(rest, expected_rest) and rest.isfinite().all())
    pieces = [packed[start:].split([N // 64, N * bits // 8, packed.numel() - start - codec.packed_bytes(N)])
              for start in range(0, packed.numel(), codec.packed_bytes(N))]  # fmt: skip
    parts = [unpack_blocks(scales.view(torch.float32), codes, bits) for scales, codes, _ in pieces]
    back, total = torch.empty_like(values), torch.empty(N, dtype=dtype)
    codec.unpack(back, packed, PIECES)
    codec.add(total, packed, PIECES, 3)
    assert back.equal(torch.cat(parts).to(dtype)) or back.isnan().equal(torch.cat(parts).isnan())
    expected_total = ((parts[0] + parts[1] + parts[2]) / torch.full((), 3.0)).to(dtype)
    assert torch.equal(total.nan_to_num(7), expected_total.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("each_isa")
def test_what_was_unpacked_packs_to_the_same_again(pool, dtype):
    codec, values = Codec(8, lambda: pool), values_for(dtype)
    packed, again = (torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8) for _ in range(2))
    codec.pack(packed, values)
    codec.unpack(back := torch.empty_like(values), packed)
    codec.pack(again, back)
    assert same(packed, again)
    assert torch.equal(back.isinf(), values.isinf())
    assert torch.equal(back.isnan(), values.isnan())
    clean, rounded = values.view(-1, 256).nan_to_num(0, 0, 0).float(), back.view(-1, 256).nan_to_num(0, 0, 0).float()
    largest = clean.abs().amax(1, keepdim=True)
    assert not rounded[2].any()  # below all that counts
    clean[2] = 0
    assert ((clean - rounded).abs() <= (0.5 / 126 + 2.0**-8) * largest).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_noise_is_fair_and_the_same_for_the_same_seed(pool, bits):
    codec = Codec(bits, lambda: pool)
    values = torch.full((256,), 0.3 / most_of(bits))
    values[0] = 1.0
    packed, total = torch.empty(codec.packed_bytes(256), dtype=torch.uint8), torch.zeros(256)
    for seed in range(500):
        codec.pack(packed, values, 1, seed)
        codec.unpack(back := torch.empty(256), packed)
        total += back / 500
    assert total[0] == pytest.approx(1.0, abs=1e-3)
    assert (total[1:] * most_of(bits) - 0.3).abs().max() < 0.1
    assert (total[1:] * most_of(bits)).mean() == pytest.approx(0.3, abs=0.01)
    again = torch.empty_like(packed)
    codec.pack(again, values, 1, 499)
    assert same(packed, again)


def test_threads_and_instruction_sets_change_nothing(isas):
    before, values, found = isa(), values_for(torch.bfloat16).repeat(200), []
    try:
        for name, threads in itertools.product(isas, (1, 3)):
            select_isa(name)
            with WorkerPool(threads) as workers:
                codec = Codec(4, lambda: workers)
                codec.pack(packed := torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8), values, 1, 5)
            found.append(packed)
    finally:
        select_isa(before)
    assert all(same(found[0], other) for other in found)


def test_what_makes_no_sense_is_refused(pool):
    for arguments, words in (((255, 1, 8), "multiple of 256"), ((256, 0, 8), "pieces"), ((256, 1, 5), "expected 8 or 4")):
        with pytest.raises(ValueError, match=words):
            quantise(pool, 64, 64, 1, *arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_accelerator_packs_the_same_bits(pool, dtype, bits):
    codec, values = Codec(bits, lambda: pool), values_for(dtype)
    found = []
    for device in ("cpu", "cuda"):
        packed = torch.empty(PIECES * codec.packed_bytes(N), dtype=torch.uint8, device=device)
        rest, total = torch.full_like(values, 0.25, device=device), torch.empty(N, dtype=dtype, device=device)
        codec.pack(packed, values.to(device), PIECES, 12345, rest)
        codec.unpack(back := torch.empty_like(values, device=device), packed, PIECES)
        codec.add(total, packed, PIECES, 3)
        found.append([packed.cpu(), rest.cpu(), back.cpu().nan_to_num(7), total.cpu().nan_to_num(7)])
    assert all(same(*pair) for pair in zip(*found, strict=True))
