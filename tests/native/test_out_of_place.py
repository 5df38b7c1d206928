"""AdamW out of place: the bits of the update in place, and not one byte written elsewhere."""

import ctypes
import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from unwall.native.library import ErrorRecord, Handle, function
from unwall.native.pool import AdamWOut, AdamWStep, DType, WorkerPool, _AdamWArguments, isa, select_isa

TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}
STEP = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)
MASTERS = ["float32", "bf16 copy", "f16 copy", "split"]
CHUNK = 1 << 16
# Shorter than a line, tails of every vector width, ends of both kinds of block, more than one chunk.
SIZES = [1, 7, 31, 32, 33, 64, 511, 512, 513, 1000, CHUNK + 13, 3 * CHUNK + 5]
# Elements by which each array starts past a line: none, all the same (a span of aligned arrays), each another.
SHIFTS = [(0, 0, 0, 0, 0), (5, 5, 5, 5, 5), (1, 30, 7, 2, 15)]
GUARD = 128
NAMES = ("param", "second", "exp_avg", "exp_avg_sq", "grad")


class Guarded:
    """A tensor that starts ``shift`` elements past a cache line, between bytes that nobody may write."""

    def __init__(self, values, shift):
        width = values.element_size()
        self.nbytes = values.numel() * width
        self.bytes = torch.full((self.nbytes + 2 * GUARD + 64 * (width + 1),), 0xA5, dtype=torch.uint8)
        to_line = -self.bytes.data_ptr() % 64
        self.begin = to_line + GUARD + shift * width
        self.content().copy_(values.view(torch.uint8))
        self.dtype = values.dtype

    def content(self):
        return self.bytes[self.begin : self.begin + self.nbytes]

    def tensor(self):
        return self.content().clone().view(self.dtype)

    @property
    def address(self):
        return self.bytes.data_ptr() + self.begin

    def intact(self):
        before, after = self.bytes[: self.begin], self.bytes[self.begin + self.nbytes :]
        return bool((before == 0xA5).all() and (after == 0xA5).all())


@dataclass
class Case:
    """The arrays of one update. ``second`` is the remainder of a split master or the copy of another, or absent."""

    master: str
    grad_dtype: DType
    values: dict

    @classmethod
    def make(cls, master, grad_dtype, n, seed=0):
        generator = torch.Generator().manual_seed(seed)
        param = torch.randn(n, generator=generator)
        values = {
            "param": param,
            "second": None,
            "exp_avg": torch.randn(n, generator=generator) * 0.1,
            "exp_avg_sq": torch.rand(n, generator=generator) * 0.01,
            "grad": torch.randn(n, generator=generator).to(TORCH[grad_dtype]),
        }
        if master == "split":
            values["param"] = param.to(torch.bfloat16)
            values["second"] = torch.randint(-(1 << 15), 1 << 15, (n,), generator=generator).to(torch.int16)
        elif master != "float32":
            values["second"] = torch.zeros(n, dtype=torch.bfloat16 if master == "bf16 copy" else torch.float16)
        return cls(master, grad_dtype, values)

    def guarded(self, shifts=SHIFTS[0]):
        pairs = zip(NAMES, shifts, strict=True)
        return {name: Guarded(self.values[name], shift) for name, shift in pairs if self.values[name] is not None}

    def options(self, second):
        """The arguments of ``adamw`` that name ``second``."""
        if self.master == "float32":
            return {}
        if self.master == "split":
            return {"remainder": second}
        return {"copy": second, "copy_dtype": DType.BF16 if self.master == "bf16 copy" else DType.F16}


def run(pool, case, arrays, second, out=None):
    n = case.values["grad"].numel()
    addresses = [arrays[name].address for name in ("param", "exp_avg", "exp_avg_sq", "grad")]
    pool.adamw(*addresses, n, STEP, grad_dtype=case.grad_dtype, out=out, **case.options(second)).wait()


def in_place(pool, case):
    arrays = case.guarded()
    run(pool, case, arrays, arrays["second"].address if "second" in arrays else None)
    return {name: array.content() for name, array in arrays.items() if name != "grad"}


def out_of_place(pool, case, shifts=SHIFTS[0], out_shifts=SHIFTS[0]):
    """The arrays that were read and those that were written, all still guarded."""
    arrays, out = case.guarded(shifts), case.guarded(out_shifts)
    del out["grad"]
    for array in out.values():
        array.content().fill_(0x5A)
    split = case.master == "split"
    second = arrays["second"] if split else out.get("second")
    where = AdamWOut(
        param=out["param"].address,
        exp_avg=out["exp_avg"].address,
        exp_avg_sq=out["exp_avg_sq"].address,
        remainder=out["second"].address if split else None,
    )
    run(pool, case, arrays, None if second is None else second.address, where)
    return arrays, out


def assert_as_in_place(pool, case, shifts, out_shifts):
    expected = in_place(pool, case)
    arrays, out = out_of_place(pool, case, shifts, out_shifts)
    for name, array in out.items():
        assert torch.equal(array.content(), expected[name]), name
        assert array.intact(), name
    for name, array in arrays.items():
        assert torch.equal(array.content(), case.values[name].view(torch.uint8)), f"{name} was changed"
        assert array.intact(), name


@pytest.mark.parametrize("grad_dtype", list(DType))
@pytest.mark.parametrize("master", MASTERS)
def test_same_bits_as_in_place_and_the_old_values_stay(pool, each_isa, master, grad_dtype):
    for n, out_shifts in itertools.product(SIZES, SHIFTS):
        assert_as_in_place(pool, Case.make(master, grad_dtype, n), SHIFTS[0], out_shifts)


@pytest.mark.parametrize("master", MASTERS)
def test_every_start_within_a_line(pool, each_isa, master):
    case = Case.make(master, DType.BF16, 200)
    for shift in range(33):
        assert_as_in_place(pool, case, (shift, 3, 1, shift, 9), (shift,) * 5)
        for alone in range(4):
            assert_as_in_place(pool, case, SHIFTS[0], tuple(shift if place == alone else 0 for place in range(5)))


@pytest.mark.parametrize("master", MASTERS)
def test_same_bits_for_any_thread_count_and_instruction_set(master, isas):
    case = Case.make(master, DType.BF16, 5 * CHUNK + 77)
    before, results = isa(), []
    try:
        for name, threads, shifts in itertools.product(isas, (1, 2, 5), SHIFTS):
            select_isa(name)
            with WorkerPool(threads) as pool:
                _, out = out_of_place(pool, case, SHIFTS[0], shifts)
            results.append({key: array.content() for key, array in out.items()})
    finally:
        select_isa(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][key], other[key]) for key in other)


@pytest.mark.parametrize("master", MASTERS)
def test_values_that_are_not_finite_come_out_as_in_place(pool, each_isa, master):
    n = 40_003
    case = Case.make(master, DType.F32, n)
    words = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    case.values["grad"] = words.to(torch.int32).view(torch.float32)  # every kind of float
    expected = in_place(pool, case)
    _, out = out_of_place(pool, case)
    for name, array in out.items():
        mine, theirs = array.tensor(), expected[name].clone().view(array.dtype)
        nan = torch.zeros_like(mine, dtype=torch.bool) if array.dtype == torch.int16 else mine.isnan()
        assert array.dtype == torch.int16 or torch.equal(nan, theirs.isnan())
        assert torch.equal(mine[~nan], theirs[~nan])
        assert name == "second" or nan.any()  # the test has some


def test_a_committed_update_goes_on_as_one_in_place_would(pool):
    case = Case.make("split", DType.BF16, 10_001)
    twice = case.guarded()
    for _ in range(2):
        run(pool, case, twice, twice["second"].address)
    arrays, out = out_of_place(pool, case)
    out["grad"] = arrays["grad"]
    run(pool, case, out, out["second"].address)
    for name in ("param", "second", "exp_avg", "exp_avg_sq"):
        assert torch.equal(out[name].content(), twice[name].content())


@pytest.mark.parametrize("shifts", SHIFTS)
def test_an_output_may_be_the_array_it_replaces(pool, each_isa, shifts):
    """A caller that keeps some of the old values and not others."""
    case = Case.make("split", DType.BF16, CHUNK + 13)
    expected, arrays = in_place(pool, case), case.guarded(shifts)
    old = {name: array.address for name, array in arrays.items()}
    spare = Guarded(torch.zeros(CHUNK + 13, dtype=torch.bfloat16), shifts[0])
    run(pool, case, arrays, old["second"], AdamWOut(spare.address, old["exp_avg"], old["exp_avg_sq"], old["second"]))
    assert torch.equal(arrays["param"].content(), case.values["param"].view(torch.uint8))
    assert torch.equal(spare.content(), expected["param"])
    for name in ("second", "exp_avg", "exp_avg_sq"):
        assert torch.equal(arrays[name].content(), expected[name])
        assert arrays[name].intact()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory():
    """Room for ten arrays of 16 elements, 64 bytes apart."""
    return torch.zeros(1024, dtype=torch.uint8)


def at(memory, place):
    return memory.data_ptr() + 64 * place


def refused(pool, memory, match, *, n=16, split=True, grad=4, copy=None, **out):
    old = [at(memory, place) for place in (0, 2, 3)]
    where = AdamWOut(at(memory, 5), at(memory, 7), at(memory, 8), at(memory, 6) if split else None)
    options = {"remainder": at(memory, 1)} if split else {"copy": copy}
    with pytest.raises(ValueError, match=match):
        pool.adamw(*old, at(memory, grad), n, STEP, out=replace(where, **out), **options)
    assert not memory.any()


def test_some_outputs_without_the_others_are_refused(pool, memory):
    for name in ("exp_avg", "exp_avg_sq"):
        refused(pool, memory, f"`out_{name}` is null", **{name: 0})
        refused(pool, memory, f"`out_{name}` is null", split=False, **{name: 0})
    refused(pool, memory, r"`out\.param` is null", param=0)
    refused(pool, memory, "`out_remainder` is null", remainder=None)
    refused(pool, memory, "float32 master has no remainder", split=False, remainder=at(memory, 6))


def test_the_library_itself_refuses_outputs_without_a_parameter(pool, memory):
    arguments = _AdamWArguments(at(memory, 0), None, None, at(memory, 1), at(memory, 2), at(memory, 3))
    arguments.out_exp_avg, arguments.n, arguments.step = at(memory, 4), 8, 1
    record = ErrorRecord()
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    call = function("uw_adamw", Handle, *types)
    assert call(pool.handle, ctypes.addressof(arguments), None, 0, ctypes.addressof(record)) == 0
    with pytest.raises(ValueError, match="`out_param` is null"):
        raise record.exception()


def test_outputs_that_overlap_inputs_are_refused(pool, memory):
    # All arrays of float are 64 bytes long, halves 32: a step of 4 bytes either way still overlaps.
    refused(pool, memory, "`out_exp_avg` overlaps `exp_avg`", exp_avg=at(memory, 2) - 4)
    refused(pool, memory, "`out_exp_avg` overlaps `exp_avg`", n=15, exp_avg=at(memory, 2) + 4)
    refused(pool, memory, "`out_exp_avg_sq` overlaps `exp_avg`", exp_avg_sq=at(memory, 2))
    refused(pool, memory, "`out_param` overlaps `param`", param=at(memory, 0) + 2)
    refused(pool, memory, "`out_param` overlaps `remainder`", param=at(memory, 1))
    refused(pool, memory, "`out_remainder` overlaps `remainder`", remainder=at(memory, 1) - 2)
    refused(pool, memory, "`out_exp_avg` overlaps `grad`", exp_avg=at(memory, 4))
    refused(pool, memory, "`copy` overlaps `exp_avg_sq`", split=False, copy=at(memory, 3) + 60)
    refused(pool, memory, "`copy` overlaps `grad`", split=False, copy=at(memory, 4))


def test_outputs_that_overlap_each_other_are_refused(pool, memory):
    refused(pool, memory, "`out_exp_avg_sq` overlaps `out_exp_avg`", exp_avg_sq=at(memory, 7))
    refused(pool, memory, "`out_remainder` overlaps `out_param`", remainder=at(memory, 5) + 30)
    refused(pool, memory, "`copy` overlaps `out_param`", split=False, copy=at(memory, 5))


def test_neighbours_do_not_overlap(pool, memory):
    floats = [at(memory, place) for place in range(8)]
    param, exp_avg, exp_avg_sq, grad = floats[:4]
    pool.adamw(param, exp_avg, exp_avg_sq, grad, 16, STEP, out=AdamWOut(*floats[4:7])).wait()


def test_nothing_to_update_is_no_error(pool):
    pool.adamw(0, 0, 0, 0, 0, STEP, out=AdamWOut(0, 0, 0)).wait()
