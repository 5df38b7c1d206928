"""The update of lean states on an accelerator: Triton's kernel has the bits of torch's operations, and these are used where it
fails."""

import contextlib
import sys
import types
import warnings

import fake_triton
import pytest
import torch

from unwall.native.lean import BLOCK, LeanArrays, lean_adamw
from unwall.native.pool import AdamWStep, WorkerPool
from unwall.optim import lean_rule
from unwall.optim.lean_format import lean_update, read_moments
from unwall.optim.lean_rule import DeviceKernel, agrees
from unwall.tiers.host import DTYPES

HERE = torch.device("cpu")
GRADS = [torch.bfloat16, torch.float16, torch.float32]
# Less than a block, less than what carries the scale, whole blocks, a tail, several programs.
SIZES = [1, 5, 64, 100, 1024, 64 * 40 + 3]
EXTREMES = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-30, -1e-20, 1e-9, 1e9, -1e15, 1e18, 2e19, -3e38]


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as made:
        yield made


@pytest.fixture
def update(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return fake_triton.kernels(monkeypatch, fake_triton.LEAN).launch


def begin(n):
    """Half, remainder, and moments without anything in them yet."""
    generator = torch.Generator().manual_seed(n)
    half = (torch.randn(n, generator=generator) * 0.02).bfloat16()
    rest = torch.randint(-128, 128, (n,), generator=generator).to(torch.int8)
    return half, rest, torch.zeros(-(-n // BLOCK) * BLOCK, dtype=torch.int16)


def usual(n, steps):
    """Of very different sizes beside each other, many of them zero."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        sizes = torch.exp(3 * torch.randn(n, generator=generator) - 6)
        yield torch.randn(n, generator=generator) * sizes * (torch.rand(n, generator=generator) < 0.5)


def extreme(n, steps, broken=True):
    """From the smallest to the largest, blocks of zeros, and what is not finite."""
    for number in range(steps):
        grad = torch.tensor(EXTREMES).roll(number).repeat(-(-n // len(EXTREMES)))[:n]
        grad[3 * BLOCK : 5 * BLOCK] = 0
        if broken and number and n > 7 * BLOCK:
            grad[6 * BLOCK + number], grad[6 * BLOCK + 20], grad[-1] = float("nan"), float("inf"), float("-inf")
        yield grad


def numbers(step, **options):
    return AdamWStep(**{"lr": 1e-2, "weight_decay": 0.1, "grad_scale": 0.7, "step": step, **options})


def native(pool):
    def run(half, rest, moments, grad, step):
        arrays = LeanArrays(half.data_ptr(), rest.data_ptr(), moments.data_ptr())
        lean_adamw(pool, arrays, grad.data_ptr(), grad.numel(), step, grad_dtype=DTYPES[grad.dtype]).wait()

    return run


def differing(found, expected):
    """Which of the three differ, how often."""
    pairs = zip(("half", "remainder", "moments"), found, expected, strict=True)
    counts = {name: int((one.view(torch.int8) != other.view(torch.int8)).sum()) for name, one, other in pairs}
    return {name: count for name, count in counts.items() if count}


def unsigned(states):
    """With every NaN the same: its sign is the processor's choice."""
    half, rest, moments = states
    return [torch.where(half.isnan(), float("nan"), half), rest, moments]


@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_the_kernel_computes_the_bits_of_torch_and_of_the_host(update, pool, n, dtype):
    for grads, options in ((usual, {}), (extreme, {}), (extreme, {"eps": 0.0, "beta1": 0.0}), (usual, {"eps": 0, "lr": 0})):
        ways = {"kernel": update, "torch": lean_update, "host": native(pool)}
        states = {name: begin(n) for name in ways}
        for number, grad in enumerate(grads(n, 4), 1):
            for name, way in ways.items():
                way(*states[name], grad.to(dtype), numbers(number * 1000 if number == 4 else number, **options))
            assert differing(states["kernel"], states["torch"]) == {}
            assert differing(unsigned(states["kernel"]), unsigned(states["host"])) == {}
        assert all(bool(values.isfinite().all()) for values in read_moments(states["kernel"][2]))


@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_trial_is_passed_by_the_kernel(update, scaled, dtype):
    assert agrees(update, HERE, dtype, scaled)


@pytest.mark.parametrize("wrong", ["scale", "noise", "tail", "factor"])
def test_the_trial_finds_what_is_wrong(wrong):
    def update(half, rest, moments, grad, step, factor):
        lean_update(half, rest, moments, grad, step, None if wrong == "factor" else factor)
        if wrong == "scale":
            moments[0] ^= 1
        elif wrong == "noise":
            rest[100] ^= 1
        elif wrong == "tail":
            half[-1] = 0

    assert not agrees(update, HERE, torch.bfloat16, scaled=True)


@pytest.mark.parametrize("n", [BLOCK * 2, BLOCK * 2 + 9])
def test_a_run_leaves_its_neighbours_alone(update, n):
    start, end = 3 * BLOCK, 3 * BLOCK + n
    whole = slice(start, start + -(-n // BLOCK) * BLOCK)
    found, expected, first = (begin(end + 5 * BLOCK) for _ in range(3))
    for number, grad in enumerate(usual(n, 3), 1):
        for (half, rest, moments), way in ((found, update), (expected, lean_update)):
            way(half[start:end], rest[start:end], moments[whole], grad, numbers(number))
    assert differing(found, expected) == {}
    assert bool((found[2][whole] != 0).any())
    for kept in (slice(0, start), slice(whole.stop, None)):
        assert differing([each[kept] for each in found], [each[kept] for each in first]) == {}
    assert all(torch.equal(each[end:], old[end:]) for each, old in zip(found[:2], first[:2], strict=True))


def on_device(dtype=torch.bfloat16):
    return types.SimpleNamespace(is_cuda=True, device=HERE, dtype=dtype)


def kernel_of(monkeypatch, launch):
    made = types.ModuleType("lean_tried")
    made.launch = launch
    monkeypatch.setitem(sys.modules, "lean_tried", made)
    return DeviceKernel("lean_tried")


@pytest.mark.parametrize("wrong", ["no Triton", "a failing compiler", "other bits"])
def test_what_fails_is_said_once_and_left_to_torch(monkeypatch, wrong):
    def fail(*_):
        raise RuntimeError("PassManager::run failed")

    found = {"no Triton": lambda: DeviceKernel("no_such_triton"), "a failing compiler": lambda: kernel_of(monkeypatch, fail),
             "other bits": lambda: kernel_of(monkeypatch, lambda *_: None)}[wrong]()  # fmt: skip
    words = {"no Triton": "not there", "a failing compiler": "PassManager", "other bits": "other bits"}[wrong]
    with pytest.warns(UserWarning, match=words):
        assert found.update_for(on_device(), False) is lean_update
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.update_for(on_device(torch.float32), True) is lean_update


def test_each_form_is_tried_once(monkeypatch):
    tried = []

    def launch(half, rest, moments, grad, step, factor):
        tried.append((grad.dtype, factor is not None))
        lean_update(half, rest, moments, grad, step, factor)

    kernel = kernel_of(monkeypatch, launch)
    for _ in range(3):
        assert kernel.update_for(on_device(), False) is launch
        assert kernel.update_for(on_device(torch.float16), True) is launch
    assert set(tried) == {(torch.bfloat16, False), (torch.float16, True)}
    assert len(tried) == 6
    assert kernel.update_for(torch.zeros(1), False) is lean_update


def usable(dtype, scaled):
    """The kernel, which is there without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update = lean_rule.KERNEL.update_for(torch.empty(0, dtype=dtype, device="cuda"), scaled)
    assert update is not lean_update
    return update


def moved(states):
    return [each.cuda() for each in states]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
def test_triton_has_the_bits_of_torch_on_an_accelerator(dtype, scaled):
    update = usable(dtype, scaled)
    factor = torch.full((), 0.3, device="cuda") if scaled else None
    for n in (*SIZES, (1 << 20) + 64, (1 << 22) + 77):
        for grads, options in ((usual, {}), (extreme, {}), (extreme, {"eps": 0.0, "beta1": 0.0})):
            found, expected = moved(begin(n)), moved(begin(n))
            for number, grad in enumerate(grads(n, 4), 1):
                for states, way in ((found, update), (expected, lean_update)):
                    way(*states, grad.to(dtype).cuda(), numbers(number, **options), factor)
                assert (n, number, differing(found, expected)) == (n, number, {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_triton_has_the_bits_of_the_host(pool, dtype):
    update = usable(dtype, False)
    for n in (100, (1 << 20) + 77):
        for grads in (usual, extreme):
            found, expected = moved(begin(n)), begin(n)
            for number, grad in enumerate(grads(n, 4), 1):
                update(*found, grad.to(dtype).cuda(), numbers(number))
                native(pool)(*expected, grad.to(dtype), numbers(number))
                assert differing(unsigned([each.cpu() for each in found]), unsigned(expected)) == {}
                for there, value in zip(found, expected, strict=True):
                    there.copy_(value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_more_elements_than_31_bits_count():
    n = (1 << 31) + 5 * BLOCK + 9
    if torch.cuda.mem_get_info()[0] < 10 * n:
        pytest.skip("needs 20 GiB of the accelerator's memory")
    update = usable(torch.bfloat16, False)
    half, rest, moments, grad = (
        torch.zeros(numel, dtype=dtype, device="cuda")
        for numel, dtype in ((n, torch.bfloat16), (n, torch.int8), (-(-n // BLOCK) * BLOCK, torch.int16), (n, torch.bfloat16))
    )
    parts = [slice(0, 1000 * BLOCK), slice((1 << 30) - BLOCK, (1 << 30) + BLOCK), slice((1 << 31) - 100 * BLOCK, n)]
    for part in parts:
        grad[part].normal_()
    update(half, rest, moments, grad, numbers(1))
    for part in parts:
        count = part.stop - part.start
        whole = slice(part.start, part.start + -(-count // BLOCK) * BLOCK)
        expected = moved([torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int8)])
        expected.append(torch.zeros_like(moments[whole]))
        lean_update(*expected, grad[part], numbers(1))
        assert differing([half[part], rest[part], moments[whole]], expected) == {}
        assert bool(half[part].any())
