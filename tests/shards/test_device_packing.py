"""Packing on an accelerator: the arithmetic of Triton's kernels, and the way back to torch's operations where they fail."""

import contextlib
import sys
import types
import warnings

import fake_triton
import pytest
import torch

from unwall.native.pool import WorkerPool
from unwall.shards import compress
from unwall.shards.compress import Codec
from unwall.shards.compress_device import DeviceKernels, agrees

HERE = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return fake_triton.kernels(monkeypatch)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernels_compute_the_bits_of_torch(kernels, bits, dtype):
    assert agrees(kernels, bits, dtype, HERE)


def test_the_kernels_compute_the_bits_of_the_host(kernels):
    """Several programs per piece, numbers of all sizes, and a seed beyond 31 bits."""
    torch.manual_seed(0)
    values = (torch.randn(4, 11, 256) * torch.logspace(-38, 30, 11)[:, None]).bfloat16().view(-1)
    for bits, seed in ((8, 0xFFFFFFFF), (4, 1)):
        with WorkerPool(1) as pool:
            codec = Codec(bits, lambda pool=pool: pool)
            packed, expected = (torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8) for _ in range(2))
            kernels.pack(packed, values, 4, bits, seed, None)
            codec.pack(expected, values, 4, seed)
            assert torch.equal(packed, expected)
            back, total = torch.empty_like(values), torch.empty(11 * 256, dtype=torch.bfloat16)
            kernels.unpack(back, packed, 4, 1, bits, 1)
            kernels.unpack(total, packed, 1, 4, bits, 4)
            codec.unpack(expected_back := torch.empty_like(back), packed, 4)
            codec.add(expected_total := torch.empty_like(total), packed, 4, 4)
            assert torch.equal(back, expected_back)
            assert torch.equal(total, expected_total)


def test_a_sum_keeps_the_sign_of_zero(kernels):
    packed = torch.zeros(260, dtype=torch.uint8)
    packed[:4] = torch.tensor([-0.0]).view(torch.uint8)
    kernels.unpack(values := torch.ones(256), packed, 1, 1, 8, 1)
    assert values.signbit().all()


def module_of(monkeypatch, pack):
    made = types.ModuleType("packing_tried")
    made.pack, made.unpack = pack, lambda *_: None
    monkeypatch.setitem(sys.modules, "packing_tried", made)
    return DeviceKernels("packing_tried")


@pytest.mark.parametrize("wrong", ["no Triton", "a failing compiler", "other bits"])
def test_what_fails_is_said_once_and_left_to_torch(monkeypatch, wrong):
    def fail(*_):
        raise RuntimeError("PassManager::run failed")

    found = {"no Triton": lambda: DeviceKernels("no_such_triton"), "a failing compiler": lambda: module_of(monkeypatch, fail),
             "other bits": lambda: module_of(monkeypatch, lambda packed, *_: packed.zero_())}[wrong]()  # fmt: skip
    words = {"no Triton": "not there", "a failing compiler": "PassManager", "other bits": "other bits"}[wrong]
    with pytest.warns(UserWarning, match=words):
        assert not found.usable(HERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not found.pack(HERE, None)
        assert not found.unpack(HERE, None)


def test_kernels_that_fail_later_are_left_then(kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "packing_tried", kernels)
    found = DeviceKernels("packing_tried")
    values, packed = torch.ones(256, dtype=torch.bfloat16), torch.empty(260, dtype=torch.uint8)
    assert found.pack(HERE, packed, values, 1, 8, None, None)
    with pytest.warns(UserWarning, match="takes? longer"):
        assert not found.pack(HERE, None, None, 1, 8, None, None)
    assert not found.usable(HERE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_triton_packs_the_bits_of_torch_on_an_accelerator(dtype, bits, monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compress.KERNELS.usable(device), "Triton's kernels are not used"
    torch.manual_seed(0)
    blocks, pieces = 1000, 3
    values = torch.randn(pieces * blocks, 256, device=device) * torch.logspace(-4, 4, pieces * blocks, device=device)[:, None]
    values[7, 3], values[8, 4], values[9] = float("inf"), float("nan"), 0.0
    values = values.view(-1).to(dtype)
    codec, found = Codec(bits, lambda: pytest.fail("not on the host")), []
    for used in (True, False):
        if not used:
            monkeypatch.setattr(compress, "KERNELS", DeviceKernels("no_such_triton"))
            compress.KERNELS._tried = True
        packed = torch.empty(codec.packed_bytes(values.numel()), dtype=torch.uint8, device=device)
        rest, total = torch.full_like(values, 0.25), torch.empty(blocks * 256, dtype=dtype, device=device)
        codec.pack(packed, values, pieces, 0xCAFEBABE, rest)
        codec.pack(nearest := torch.empty_like(packed), values, pieces)
        codec.unpack(back := torch.empty_like(values), packed, pieces)
        codec.add(total, packed, pieces, 3)
        found.append([packed, rest.view(torch.uint8), nearest, back.nan_to_num(7), total.nan_to_num(7)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
