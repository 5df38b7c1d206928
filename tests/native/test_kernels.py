"""The arithmetic of the native kernels, against torch, on every instruction set that this processor has."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unwall.native.pool import AdamWStep, DType, WorkerPool, isa, select_isa

TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}
STEP = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)
# Tails of every vector width, and more than one chunk.
SIZES = [1, 7, 31, 64, 1000, (1 << 16) + 13, 3 * (1 << 16) + 5]


def bits(tensor):
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def same(left, right):
    """Equal bits, except that any NaN equals any NaN."""
    nan = left.isnan()
    return torch.equal(nan, right.isnan()) and torch.equal(bits(left)[~nan], bits(right)[~nan])


def random_floats(n, seed=0):
    """Every kind of float32: uniformly random bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (n,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)


def edge_floats():
    """Values at which a conversion can go wrong, of both signs, with their neighbours."""
    marks = [0.0, 2.0**-149, 2.0**-126, 2.0**-25, 2.0**-24, 1.5 * 2.0**-24, 2.0**-14, 1.0, 2048.5, 65504.0, 65519.0, 65520.0]
    marks += [3.3895313892515355e38, 3.3961775292304957e38, 3.4028234663852886e38, math.inf]
    middle = torch.tensor(marks).view(torch.int32).to(torch.int64)
    near = (middle[:, None] + torch.arange(-3, 4)).clamp(min=0).flatten()
    halfway = torch.cat([(torch.arange(0, 1 << 15) << 16) + 0x8000, (torch.arange(0, 1 << 18) << 13) + 0x1000])
    magnitudes = torch.cat([near, halfway, halfway - 1, halfway + 1]).clamp(max=0x7FFFFFFF).to(torch.int32)
    return torch.cat([magnitudes.view(torch.float32), -magnitudes.view(torch.float32)])


def cast(pool, src, to):
    dst = torch.empty(src.numel(), dtype=TORCH[to])
    kind = next(key for key, value in TORCH.items() if value == src.dtype)
    pool.cast(dst.data_ptr(), to, src.data_ptr(), kind, src.numel()).wait()
    return dst


# ---- casts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [DType.BF16, DType.F16])
@pytest.mark.parametrize("target", list(DType))
def test_cast_of_every_16_bit_pattern(pool, each_isa, source, target):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(TORCH[source])
    assert same(cast(pool, every, target), every.to(TORCH[target]))


@pytest.mark.parametrize("target", list(DType))
def test_cast_of_floats_rounds_to_nearest_even(pool, each_isa, target):
    for values in (edge_floats(), random_floats(1 << 20), torch.randn(100_003) * 1e-5, torch.randn(100_003) * 1e4):
        assert same(cast(pool, values, target), values.to(TORCH[target]))


def test_cast_keeps_nan_nan(pool, each_isa):
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F80FFFF], dtype=torch.int32)
    nans = torch.cat([payloads, payloads | -(1 << 31)]).view(torch.float32)
    for target in DType:
        assert cast(pool, nans, target).isnan().all()


def test_cast_to_the_same_type_keeps_the_bits(pool, each_isa):
    values = random_floats(1 << 16)
    assert torch.equal(bits(cast(pool, values, DType.F32)), bits(values))


# ---- split master ----------------------------------------------------------------------------------------------------


def split(pool, src):
    half, rest = torch.empty(src.numel(), dtype=torch.bfloat16), torch.empty(src.numel(), dtype=torch.int16)
    pool.split(half.data_ptr(), rest.data_ptr(), src.data_ptr(), src.numel()).wait()
    return half, rest


def join(pool, half, rest):
    dst = torch.empty(half.numel())
    pool.join(dst.data_ptr(), half.data_ptr(), rest.data_ptr(), half.numel()).wait()
    return dst


def test_split_and_join_lose_nothing(pool, each_isa):
    for values in (edge_floats(), random_floats(1 << 20)):
        half, rest = split(pool, values)
        assert same(join(pool, half, rest), values)
        assert torch.equal(half.isnan(), values.isnan())


def test_half_of_the_split_master_is_the_rounded_value(pool, each_isa):
    values = torch.randn(100_003)
    half, rest = split(pool, values)
    ties = rest == -(1 << 15)  # the split rounds these up, round-to-nearest-even half of them
    assert torch.equal(half[~ties], values.to(torch.bfloat16)[~ties])
    top = torch.tensor([3.4e38, -3.4e38])  # above the largest bf16: the half is inf, the pair is exact
    half, rest = split(pool, top)
    assert half.isinf().all()
    assert torch.equal(join(pool, half, rest), top)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=70))
def test_split_and_join_of_any_floats(values):
    with WorkerPool(1) as pool:
        source = torch.tensor(values, dtype=torch.float32)
        assert torch.equal(bits(join(pool, *split(pool, source))), bits(source))


# ---- AdamW -----------------------------------------------------------------------------------------------------------


def state(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    param, grad = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    return param, torch.randn(n, generator=generator) * 0.1, torch.rand(n, generator=generator) * 0.01, grad


def update(pool, param, exp_avg, exp_avg_sq, grad, step=STEP, **options):
    kind = next(key for key, value in TORCH.items() if value == grad.dtype)
    addresses = [tensor.data_ptr() for tensor in (param, exp_avg, exp_avg_sq, grad)]
    pool.adamw(*addresses, grad.numel(), step, grad_dtype=kind, **options).wait()


@pytest.mark.parametrize("hyper", [(1e-3, 0.9, 0.999, 1e-8, 0.01), (1e-2, 0.8, 0.95, 1e-6, 0.0), (3e-4, 0.0, 0.99, 1e-8, 0.5)])
def test_adamw_follows_torch(pool, each_isa, hyper):
    lr, beta1, beta2, eps, decay = hyper
    n = 70_001
    mine = torch.randn(n, generator=torch.Generator().manual_seed(1))
    theirs = torch.nn.Parameter(mine.clone())
    optimizer = torch.optim.AdamW([theirs], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    exp_avg, exp_avg_sq = torch.zeros(n), torch.zeros(n)
    for step in range(1, 26):
        grad = torch.randn(n, generator=torch.Generator().manual_seed(step))
        numbers = AdamWStep(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, grad_scale=1.0, step=step)
        update(pool, mine, exp_avg, exp_avg_sq, grad, numbers)
        theirs.grad = grad
        optimizer.step()
    expected = theirs.detach()
    assert ((mine - expected).norm() / expected.norm()).item() < 1e-6
    # Element by element, where the value is not the small difference of large ones.
    assert ((mine - expected).abs() / expected.abs().clamp(min=0.1)).max().item() < 1e-6


@pytest.mark.parametrize("grad_dtype", list(DType))
@pytest.mark.parametrize("n", [1000, (1 << 16) + 13])
def test_adamw_variants_agree(pool, each_isa, grad_dtype, n):
    """Gradient types, copies and the split master change the format and never the numbers."""
    param, exp_avg, exp_avg_sq, grad = state(n)
    grad = grad.to(TORCH[grad_dtype])
    expected, m, v = param.clone(), exp_avg.clone(), exp_avg_sq.clone()
    update(pool, expected, m, v, grad.float())

    for copy_dtype in (None, DType.BF16, DType.F16):
        mine, mine_m, mine_v = param.clone(), exp_avg.clone(), exp_avg_sq.clone()
        options, copy = {}, None
        if copy_dtype is not None:
            copy = torch.empty(n, dtype=TORCH[copy_dtype])
            options = {"copy": copy.data_ptr(), "copy_dtype": copy_dtype}
        update(pool, mine, mine_m, mine_v, grad, **options)
        assert torch.equal(mine, expected)
        assert torch.equal(mine_m, m)
        assert torch.equal(mine_v, v)
        assert copy is None or torch.equal(copy, expected.to(copy.dtype))

    half, rest = split(pool, param)
    mine_m, mine_v = exp_avg.clone(), exp_avg_sq.clone()
    update(pool, half, mine_m, mine_v, grad, remainder=rest.data_ptr())
    assert torch.equal(join(pool, half, rest), expected)
    assert torch.equal(mine_m, m)
    assert torch.equal(mine_v, v)


def test_grad_scale_multiplies_the_gradient(pool, each_isa):
    param, exp_avg, exp_avg_sq, grad = state(1000)
    scaled = [tensor.clone() for tensor in (param, exp_avg, exp_avg_sq)]
    plain = AdamWStep(lr=STEP.lr, beta1=STEP.beta1, beta2=STEP.beta2, eps=STEP.eps, weight_decay=0.1, step=STEP.step)
    update(pool, param, exp_avg, exp_avg_sq, grad)
    update(pool, *scaled, grad * STEP.grad_scale, plain)
    assert torch.equal(param, scaled[0])


def test_nan_gradient_shows_in_every_format(pool, each_isa):
    param, exp_avg, exp_avg_sq, grad = state(100)
    grad[17] = math.nan
    half, rest = split(pool, param)
    update(pool, half, exp_avg.clone(), exp_avg_sq.clone(), grad, remainder=rest.data_ptr())
    copy = torch.empty(100, dtype=torch.float16)
    update(pool, param, exp_avg, exp_avg_sq, grad, copy=copy.data_ptr(), copy_dtype=DType.F16)
    for result in (param, copy, half):
        assert result.isnan().nonzero().flatten().tolist() == [17]


def _every_adamw(pool, n):
    results = []
    for grad_dtype, variant in itertools.product(DType, ("plain", "bf16", "f16", "split")):
        param, exp_avg, exp_avg_sq, grad = state(n, seed=5)
        grad = grad.to(TORCH[grad_dtype])
        if variant == "split":
            param, second = split(pool, param)
            options = {"remainder": second.data_ptr()}
        else:
            second = torch.zeros(n, dtype=torch.float16 if variant == "f16" else torch.bfloat16)
            options = {"copy": second.data_ptr(), "copy_dtype": DType.F16 if variant == "f16" else DType.BF16}
            options = {} if variant == "plain" else options
        update(pool, param, exp_avg, exp_avg_sq, grad, **options)
        results += [bits(tensor) for tensor in (param, second, exp_avg, exp_avg_sq)]
    return results


@pytest.mark.parametrize("n", SIZES)
def test_same_bits_on_every_instruction_set_and_thread_count(n, isas):
    before, results = isa(), []
    try:
        for name, threads in itertools.product(isas, (1, 2, 5)):
            select_isa(name)
            with WorkerPool(threads) as pool:
                results.append(_every_adamw(pool, n) + _every_sum(pool, n))
    finally:
        select_isa(before)
    for other in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], other, strict=True))


# ---- sums ------------------------------------------------------------------------------------------------------------


def sum_squares(pool, values):
    kind = next(key for key, value in TORCH.items() if value == values.dtype)
    ticket, result = pool.sum_squares(values.data_ptr(), values.numel(), kind)
    ticket.wait()
    return result.sum, result.nonfinite


def _every_sum(pool, n):
    values = torch.randn(n, generator=torch.Generator().manual_seed(7))
    sums = [sum_squares(pool, values.to(dtype))[0] for dtype in TORCH.values()]
    return [torch.tensor(sums, dtype=torch.float64).view(torch.int64)]


@pytest.mark.parametrize("dtype", list(TORCH.values()))
@pytest.mark.parametrize("n", SIZES)
def test_sum_squares(pool, each_isa, dtype, n):
    values = torch.randn(n).to(dtype)
    total, nonfinite = sum_squares(pool, values)
    assert total == pytest.approx(math.fsum(x * x for x in values.double().tolist()), rel=1e-13)
    assert nonfinite == 0


@pytest.mark.parametrize("dtype", list(TORCH.values()))
def test_sum_squares_counts_what_is_not_finite(pool, each_isa, dtype):
    values = torch.zeros(200_003, dtype=dtype)
    values[[5, 70_000, 200_002]] = torch.tensor([math.inf, -math.inf, math.inf], dtype=dtype)
    assert sum_squares(pool, values) == (math.inf, 3)
    values[9] = math.nan
    total, nonfinite = sum_squares(pool, values)
    assert math.isnan(total)
    assert nonfinite == 4


def test_sum_squares_does_not_overflow_or_underflow(pool, each_isa):
    assert sum_squares(pool, torch.full((100,), 3e38))[0] == pytest.approx(100 * 9e76, rel=1e-6)
    assert sum_squares(pool, torch.full((100,), 1e-40))[0] == pytest.approx(100 * 1e-80, rel=1e-3)


@pytest.mark.parametrize("dtype", list(TORCH))
@pytest.mark.parametrize("n", SIZES)
def test_accumulate_adds_in_float(pool, each_isa, dtype, n):
    total, values = torch.randn(n), torch.randn(n).to(TORCH[dtype])
    expected = total + values.float()
    pool.accumulate(total.data_ptr(), values.data_ptr(), n, dtype).wait()
    assert torch.equal(total, expected)
