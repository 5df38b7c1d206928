"""AdamW with a way back: the bits of the plain update, the old bits again, or those of an update with other numbers."""

from dataclasses import replace

import pytest
import torch

from unwall.native.journal import AdamWArrays, journal_bytes, read_journal, resolve, update_journaled
from unwall.native.memory import HostMemory
from unwall.native.pool import AdamWStep, DType, isa, select_isa

TORCH = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}
MASTERS = {"float32": None, "bf16 copy": torch.bfloat16, "f16 copy": torch.float16, "split": None}
STEP = AdamWStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=12)
CLIPPED = replace(STEP, grad_scale=0.37)
CHUNK = 1 << 16
SIZES = [1, 31, 32, 33, 1000, CHUNK + 13, 2 * CHUNK]
ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, float("inf"), -float("inf"), float("nan"), 1.0])


class Update:
    """The arrays of one update and memory for its journal."""

    def __init__(self, pool, master, grad_dtype, values):
        self.pool, self.n = pool, values["grad"].numel()
        self.tensors = {name: value.clone() for name, value in values.items()}
        self.memory = HostMemory(max(1, journal_bytes(self.n)))
        second = self.tensors["second"].data_ptr() if "second" in self.tensors else None
        split = master == "split"
        self.arrays = AdamWArrays(
            param=self.tensors["param"].data_ptr(),
            exp_avg=self.tensors["exp_avg"].data_ptr(),
            exp_avg_sq=self.tensors["exp_avg_sq"].data_ptr(),
            grad=self.tensors["grad"].data_ptr(),
            n=self.n,
            grad_dtype=grad_dtype,
            remainder=second if split else None,
            copy=None if split else second,
            copy_dtype=DType.F16 if MASTERS[master] is torch.float16 else DType.BF16,
        )

    def plain(self, step):
        at = self.arrays
        places = {"grad_dtype": at.grad_dtype, "remainder": at.remainder, "copy": at.copy, "copy_dtype": at.copy_dtype}
        self.pool.adamw(at.param, at.exp_avg, at.exp_avg_sq, at.grad, at.n, step, **places).wait()
        return self.bits()

    def journaled(self, step=STEP):
        update_journaled(self.pool, self.arrays, step, self.memory.address).wait()
        return self.bits()

    def resolve(self, again, used=STEP):
        resolve(self.pool, self.arrays, used, again, self.memory.address).wait()
        return self.bits()

    def read(self):
        return read_journal(self.memory.address, self.n)

    def bits(self):
        return {name: tensor.view(torch.uint8).clone() for name, tensor in self.tensors.items()}


def settled(n, master, grad_dtype, seed=0):
    """States as after some steps: moments that belong to the gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(n, generator=generator)

    grad = normal()
    values = {"exp_avg": 0.5 * normal() + 0.1 * grad, "exp_avg_sq": normal().square() + 0.3, "grad": grad.to(TORCH[grad_dtype])}
    return {**values, **_param(normal(), master, generator)}


def _param(param, master, generator):
    if master == "split":
        rest = torch.randint(-(1 << 15), 1 << 15, (param.numel(),), generator=generator).to(torch.int16)
        return {"param": param.to(torch.bfloat16), "second": rest}
    return {"param": param} if MASTERS[master] is None else {"param": param, "second": param.to(MASTERS[master])}


def odd(master, grad_dtype):
    """Every combination of odd values."""
    param, exp_avg, exp_avg_sq, grad = (part.flatten() for part in torch.meshgrid(ODD, ODD, ODD.abs(), ODD, indexing="ij"))
    values = {"exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone(), "grad": grad.to(TORCH[grad_dtype])}
    return {**values, **_param(param.clone(), master, torch.Generator().manual_seed(0))}


def same(left, right):
    return [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("grad_dtype", list(DType))
@pytest.mark.parametrize("master", MASTERS)
def test_it_is_the_plain_update_and_can_be_taken_back_or_done_again(pool, each_isa, master, grad_dtype):
    for n in SIZES:
        values = settled(n, master, grad_dtype)
        expected = {
            scale: Update(pool, master, grad_dtype, values).plain(replace(STEP, grad_scale=scale)) for scale in (1, 0.37)
        }
        for again, result in ((None, None), (STEP, expected[1]), (CLIPPED, expected[0.37])):
            update = Update(pool, master, grad_dtype, values)
            before = update.bits()
            assert same(update.journaled(), expected[1]) == []
            assert update.read().owing == 0
            assert same(update.resolve(again), before if again is None else result) == []
            assert same(update.resolve(None), before if again is None else result) == []  # nothing is left to do


@pytest.mark.parametrize("grad_dtype", list(DType))
@pytest.mark.parametrize("master", MASTERS)
def test_values_of_every_kind_come_back_bit_by_bit(pool, each_isa, master, grad_dtype):
    """Most of these do not fit: whole chunks are left as they were, and their update comes when it is asked for."""
    values = odd(master, grad_dtype)
    chosen = torch.randperm(values["grad"].numel(), generator=torch.Generator().manual_seed(0))[:500]
    rare = settled(256 * len(chosen), master, grad_dtype)
    for name, value in rare.items():
        value[::256] = values[name][chosen]
    for case, crowded in ((values, True), (rare, False)):
        update = Update(pool, master, grad_dtype, case)
        before = update.bits()
        update.journaled()
        assert (update.read().owing > 0) == crowded
        assert (update.read().escaped > 0) != crowded
        assert same(update.resolve(None), before) == []


def test_a_chunk_with_too_many_escapes_is_updated_when_it_is_resolved(pool, each_isa):
    """As in the second step, when a tenth of the second moments are much smaller than what is added to them."""
    values = settled(3 * CHUNK, "split", DType.BF16)
    values["exp_avg_sq"][CHUNK : 2 * CHUNK] *= 1e-6
    for again in (STEP, CLIPPED):
        update = Update(pool, "split", DType.BF16, values)
        update.journaled()
        assert update.read().owing == CHUNK
        assert same(update.resolve(again), Update(pool, "split", DType.BF16, values).plain(again)) == []


def test_every_instruction_set_takes_back_what_another_has_done(pool, isas):
    values, chosen = settled(5000, "split", DType.BF16), isa()
    try:
        for first, second in [(first, second) for first in isas for second in isas]:
            update = Update(pool, "split", DType.BF16, values)
            before = update.bits()
            select_isa(first)
            update.journaled()
            select_isa(second)
            assert same(update.resolve(None), before) == []
    finally:
        select_isa(chosen)


def test_many_steps_with_clipping_now_and_then(pool):
    """Escapes stay rare, and nothing drifts."""
    generator, n = torch.Generator().manual_seed(1), CHUNK
    values = settled(n, "split", DType.BF16)
    values["exp_avg"].zero_()
    values["exp_avg_sq"].zero_()
    plain, update = Update(pool, "split", DType.BF16, values), Update(pool, "split", DType.BF16, values)
    for number in range(1, 25):
        step = replace(STEP, step=number)
        clipped = replace(step, grad_scale=0.5) if number % 3 == 0 else step
        grad = torch.randn(n, generator=generator).to(torch.bfloat16)
        for one in (plain, update):
            one.tensors["grad"].copy_(grad)
        update.journaled(step)
        if number >= 5:
            escaped, owing = update.read()
            assert owing == 0
            assert escaped < n / 128
        assert same(update.resolve(clipped, step), plain.plain(clipped)) == []


def test_what_makes_no_sense_is_refused(pool):
    update = Update(pool, "float32", DType.F32, settled(100, "float32", DType.F32))
    with pytest.raises(ValueError, match="`journal` is null"):
        update_journaled(pool, update.arrays, STEP, 0)
    with pytest.raises(ValueError, match="does not start a line"):
        update_journaled(pool, update.arrays, STEP, update.memory.address + 8)
    with pytest.raises(ValueError, match="no journal of -1 elements"):
        read_journal(update.memory.address, -1)
    assert journal_bytes(0) == 0
    assert 2 * CHUNK < journal_bytes(CHUNK) < 2.2 * CHUNK
