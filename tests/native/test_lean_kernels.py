"""The lean update: the same bits on every instruction set and in torch, errors within the format's bounds, no drift."""

import pytest
import torch

from unwall.native.lean import BLOCK, LeanArrays, lean_adamw
from unwall.native.pool import AdamWStep, DType, WorkerPool, isa, select_isa
from unwall.optim.lean_format import lean_update, read_moment, read_moments, write_moment
from unwall.shards.master import join, split_into

TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}
# Less than a block, tails shorter and longer than what carries the scale, more than one chunk.
SIZES = [1, 5, 64, 100, 1000, (1 << 16) + 70]


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as made:
        yield made


def begin(n, pool):
    """Parameters without moments yet."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.02
    half, rest = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int8)
    split_into(half, rest, values, pool)
    return half, rest, torch.zeros(-(-n // BLOCK) * BLOCK, dtype=torch.int16)


def gradients(n, steps, dtype):
    """Of very different sizes beside each other, many of them zero."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        sizes = torch.exp(3 * torch.randn(n, generator=generator) - 6)
        kept = torch.rand(n, generator=generator) < 0.5
        found.append((torch.randn(n, generator=generator) * sizes * kept).to(dtype))
    return found


def native(pool, states, grad, step, out=None):
    arrays = [LeanArrays(*(tensor.data_ptr() for tensor in some)) for some in (states, out or states)]
    dtype = next(key for key, value in TORCH.items() if value is grad.dtype)
    into = None if out is None else arrays[1]
    lean_adamw(pool, arrays[0], grad.data_ptr(), grad.numel(), step, grad_dtype=dtype, out=into, keep=(states, out)).wait()


def bits(states):
    return [tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor for tensor in states]


def equal(left, right):
    return all(torch.equal(one, other) for one, other in zip(bits(left), bits(right), strict=True))


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("n", SIZES)
def test_every_way_gives_the_same_bits(pool, n, dtype):
    first, chosen = begin(n, pool), isa()
    grads = gradients(n, 5, TORCH[dtype])
    if n > 10:
        grads[2][5], grads[3][7] = float("inf"), float("nan")
    results = {}
    try:
        for way in ("baseline", "avx2", "avx512", "torch", "out of place"):
            if way in ("baseline", "avx2", "avx512"):
                try:
                    select_isa(way)
                except ValueError:
                    continue
            states = tuple(tensor.clone() for tensor in first)
            for number, grad in enumerate(grads, 1):
                step = AdamWStep(lr=1e-2, weight_decay=0.1, grad_scale=0.7, step=number)
                if way == "torch":
                    lean_update(*states, grad, step)
                elif way == "out of place":
                    old, kept = states, [tensor.clone() for tensor in states]
                    states = tuple(torch.zeros_like(tensor) for tensor in old)
                    native(pool, old, grad, step, states)
                    assert equal(old, kept)
                else:
                    native(pool, states, grad, step)
            results[way] = states
    finally:
        select_isa(chosen)
    assert [way for way, states in results.items() if not equal(states, results["baseline"])] == []
    half, _, moments = results["baseline"]
    assert int((~half.isfinite()).sum()) == (2 if n > 10 else 0)  # those elements and no neighbours
    assert all(bool(values.isfinite().all()) for values in read_moments(moments))


@pytest.mark.parametrize("dtype", list(DType))
def test_blocks_of_every_kind_beside_each_other_have_the_same_bits(pool, dtype):
    """Those of a dense layer are done by code of their own, and so are those with roots that are denormal in the format."""
    n, chosen = BLOCK * 40, isa()
    first = begin(n, pool)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(n, generator=generator) * 0.01 for _ in range(3)]
    for grad in grads:
        blocks = grad.view(-1, BLOCK)
        blocks[5:8] = 0  # rows that are never seen
        blocks[12:20:2, ::3] *= 1e-6
        blocks[20:22, 7] = 0
    grads[1][BLOCK * 25 + 9] = float("nan")
    results = {}
    try:
        for way in ("baseline", "avx2", "avx512", "torch"):
            if way != "torch":
                try:
                    select_isa(way)
                except ValueError:
                    continue
            states = tuple(tensor.clone() for tensor in first)
            for number, grad in enumerate(grads, 1):
                step, given = AdamWStep(lr=1e-2, weight_decay=0.1, grad_scale=0.7, step=number), grad.to(TORCH[dtype])
                if way == "torch":
                    lean_update(*states, given, step)
                else:
                    native(pool, states, given, step)
            results[way] = states
    finally:
        select_isa(chosen)
    assert [way for way, states in results.items() if not equal(states, results["baseline"])] == []


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_no_gradient_that_is_finite_spoils_a_parameter(pool, eps):
    sizes = [0.0, 1e-38, 1e-30, 1e-20, 1e-9, 1.0, 1e9, 1e15, 1e18, 2e19, 3e38]
    grad = torch.tensor([sign * size for size in sizes for sign in (1, -1)]).repeat(20)
    states = begin(grad.numel(), pool)
    for number in range(1, 5):
        native(pool, states, grad, AdamWStep(lr=1e-2, eps=eps, step=number))
        assert bool(states[0].isfinite().all())
        assert all(bool(values.isfinite().all()) for values in read_moments(states[2]))


def test_what_leaves_as_fp32_comes_back_as_the_same_bytes(pool):
    states = begin(5000, pool)
    for number, grad in enumerate(gradients(5000, 8, torch.float32), 1):
        native(pool, states, grad * 10.0 ** (number - 5), AdamWStep(lr=1e-2, step=number))
        moments = states[2]
        mean, square = read_moment(moments, "exp_avg"), read_moment(moments, "exp_avg_sq")
        again = torch.zeros_like(moments)
        write_moment(again, "exp_avg_sq", square)
        write_moment(again, "exp_avg", mean)
        assert torch.equal(again, moments)
        assert all(torch.equal(one, other) for one, other in zip(read_moments(moments), (mean, square), strict=True))
        half, rest = torch.empty_like(states[0]), torch.empty_like(states[1])
        split_into(half, rest, join(states[0], states[1]), pool)
        assert equal((half, rest), states[:2])


def test_errors_are_within_the_bounds_of_the_format(pool):
    generator = torch.Generator().manual_seed(0)
    n = 64 * 200
    root = torch.exp(torch.randn(n, generator=generator))  # all within 2^-14 of the largest of their block
    ratio = (torch.randn(n, generator=generator) * 2).clamp(-7, 7)
    moments = torch.zeros(n, dtype=torch.int16)
    write_moment(moments, "exp_avg_sq", root.square())
    write_moment(moments, "exp_avg", ratio * root)
    mean, square = read_moments(moments)
    assert float(((square.sqrt() - root) / root).abs().max()) <= 1 / 32 + 1e-6
    lanes = torch.arange(n) % 64
    step = torch.where(lanes < 8, 2.0, 1.0) / 16  # the first eight of a block have one bit less
    allowed = 0.5 * step * (mean / square.sqrt()).abs().clamp(min=0.125) * 2 + 1 / 32 * ratio.abs()
    assert bool(((mean / square.sqrt() - ratio).abs() <= allowed).all())
    values = torch.randn(n, generator=generator)
    half, rest = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int8)
    split_into(half, rest, values, pool)
    assert float(((join(half, rest) - values) / values).abs().max()) <= 2.0**-15


def test_rounding_does_not_drift(pool):
    """Over hundreds of steps without a gradient the second moment and a decaying weight go where exact arithmetic goes, though
    each single step is far less than what the format can tell apart."""
    n, steps = 64 * 64, 700
    half, rest, moments = begin(n, pool)
    split_into(half, rest, torch.rand(n, generator=torch.Generator().manual_seed(2)) + 0.5, pool)
    start = join(half, rest).double()
    write_moment(moments, "exp_avg_sq", torch.ones(n))
    zero = torch.zeros(n, dtype=torch.bfloat16)
    for number in range(1, steps + 1):
        native(pool, (half, rest, moments), zero, AdamWStep(lr=1e-3, weight_decay=1e-3, step=number))
    square = read_moment(moments, "exp_avg_sq")
    assert float(square.sqrt().mean()) == pytest.approx(0.999 ** (steps / 2), rel=0.02)
    kept = (join(half, rest).double() / start).mean()
    assert float(1 - kept) == pytest.approx(1 - (1 - 1e-6) ** steps, rel=0.1)


def test_arguments_that_make_no_sense_are_refused(pool):
    states = begin(64, pool)
    grad = torch.zeros(64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="step"):
        native(pool, states, grad, AdamWStep(lr=1e-3, step=0))
    with pytest.raises(ValueError, match="betas"):
        native(pool, states, grad, AdamWStep(lr=1e-3, beta1=1.0, step=1))
    with pytest.raises(ValueError, match="null"):
        lean_adamw(pool, LeanArrays(0, 0, 0), grad.data_ptr(), 64, AdamWStep(lr=1e-3, step=1))
