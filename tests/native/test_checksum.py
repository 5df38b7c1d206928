"""Checksums of the native library: those of zlib, whatever the length and wherever the bytes lie."""

import random
import zlib

import pytest
import torch

from unwall.native import checksum

pytestmark = pytest.mark.usefixtures("each_isa")


def _bytes(n, seed=0):
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_is_the_checksum_of_zlib():
    data = _bytes(200_000)
    rng = random.Random(7)
    for n in [*range(600), 65536, 65537, 131072 + 15, 199_000]:
        start = rng.randrange(data.numel() - n)
        part = data[start : start + n]
        before = rng.getrandbits(32)
        assert checksum.crc32(part.data_ptr(), n, before) == zlib.crc32(part.numpy(), before)


def test_copies_what_it_checks_and_nothing_else():
    data = _bytes(200_000)
    for n in (0, 1, 63, 255, 257, 320, 383, 4096, 65536, 150_001):
        for shift in (0, 1, 4):
            target = torch.zeros(n + 64, dtype=torch.uint8)
            found = checksum.crc32_copy(target[shift:].data_ptr(), data[3:].data_ptr(), n, 5)
            assert found == zlib.crc32(data[3 : 3 + n].numpy(), 5)
            assert torch.equal(target[shift : shift + n], data[3 : 3 + n])
            assert not target[:shift].any()
            assert not target[shift + n :].any()


def test_halves_come_together_and_apart_again():
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(1))
    half, rest = torch.empty(70_001, dtype=torch.bfloat16), torch.empty(70_001, dtype=torch.int16)
    found = checksum.crc32_split(half.data_ptr(), rest.data_ptr(), values.data_ptr(), values.numel())
    assert found == zlib.crc32(values.numpy())
    again = torch.empty_like(values)
    assert checksum.crc32_join(again.data_ptr(), half.data_ptr(), rest.data_ptr(), values.numel()) == found
    assert torch.equal(again, values)
