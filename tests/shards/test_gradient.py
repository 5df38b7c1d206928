"""The gradient of one real group: its life on each tier, over passes and ranks, and what it refuses."""

import errno
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unwall.native.disk import DiskEngine
from unwall.native.pool import WorkerPool
from unwall.shards.accumulate import Accumulator
from unwall.shards.collectives import Collective, Ranks
from unwall.shards.gradient import Gradient, Phase
from unwall.shards.group import Group
from unwall.shards.home import DEVICE, DISK, HOST, Home
from unwall.shards.landing import Holding
from unwall.shards.layout import build_layout
from unwall.shards.reduce import Reducer
from unwall.shards.squares import SquareSum, counted_part
from unwall.shards.store import Staging
from unwall.tiers.device import DeviceTier
from unwall.tiers.disk import DiskTier
from unwall.tiers.host import HostTier
from unwall.tiers.ledger import BudgetError
from unwall.tiers.tiers import Tiers

SHAPES = [torch.Size((40, 60)), torch.Size((50,)), torch.Size((7, 11))]
HOMES = {"device": DEVICE, "host": HOST, "disk": DISK}
EVERYWHERE = pytest.mark.parametrize("tier", HOMES)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


class Twins(Ranks):
    """Two ranks of which the other one always sends what this one sends, and has its shard ready when it is gathered."""

    def __init__(self):
        super().__init__()
        self.size, self.calls = 2, []

    def reduce_scatter(self, shard, whole):
        self.calls.append("reduce-scatter")
        shard.copy_(whole[: shard.numel()]).mul_(2)
        self.other = 2 * whole[shard.numel() :]
        return Collective(SimpleNamespace(wait=lambda: None, is_completed=lambda: True))

    def all_gather(self, whole, shard):
        self.calls.append("all-gather")
        scale = 1 if shard.dtype is torch.float16 else 2  # the other rank has divided its sum, too
        whole.copy_(torch.cat([shard, self.other / scale]))
        return Collective(SimpleNamespace(wait=lambda: None, is_completed=lambda: True))


class Bench:
    """Real tiers on the CPU, and gradients of one group on them."""

    def __init__(self, folder):
        self.engine = DiskEngine(threads=2)
        self.pool = WorkerPool(1)
        self.disk = DiskTier([folder], engine=self.engine, growth_bytes=1 << 20)
        self.tiers = Tiers(DeviceTier(torch.device("cpu")), HostTier(self.pool), self.disk, ring_slot_bytes=1 << 16)

    def gradient(self, home: Home, dtype, ranks=None, stage=3) -> Gradient:
        ranks = Ranks() if ranks is None else ranks
        layout = build_layout(["a", "b", "c"], SHAPES, dtype, ranks.size)
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        alone = ranks.size == 1
        self.group = Group(
            0,
            "layers.0",
            layout,
            params,
            [dtype] * 3,
            self.tiers,
            ranks,
            home,
            Staging(),
            cut=stage == 3 and not alone,
            own_all=stage == 0 or alone,
        )
        return Gradient(self.group, self.tiers, ranks, dtype, keep_flat=stage < 2, everywhere=stage == 0)

    def live(self):
        return {name: ledger.live_bytes for name, ledger in self.tiers.ledgers.items()}

    def close(self):
        self.tiers.links.close()
        self.disk.close()
        self.engine.close()
        self.pool.close()


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.close()


def grads(seed, dtype, slots=(0, 1, 2)):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return {slot: drawn[slot] for slot in slots}


def laid_out(group, given, dtype):
    """The flat buffer that these gradients make."""
    flat = torch.zeros(group.layout.padded_numel, dtype=dtype)
    for slot, grad in given.items():
        place = group.layout.slots[slot]
        flat[place.offset : place.end] = grad.reshape(-1)
    return flat


def run_pass(gradient, given, finish=True):
    for slot, grad in given.items():
        gradient.take(slot, grad)
    gradient.begin_reduce(gradient.pending)
    if finish:
        gradient.finish_reduce()


def looked_at(gradient):
    value = gradient.read().clone()
    gradient.group.pending.staging.close()
    return value


# -- one rank: device, host and disk ----------------------------------------------------------------------------------


@EVERYWHERE
@DTYPES
def test_one_pass_lands_as_it_is(bench, tier, dtype):
    gradient = bench.gradient(HOMES[tier], dtype)
    given = grads(1, dtype, slots=(0, 2))
    run_pass(gradient, given)
    assert gradient.held
    assert (gradient.passes, gradient.present, gradient.pending) == (1, {0, 2}, set())
    assert torch.equal(looked_at(gradient), laid_out(bench.group, given, dtype))  # zeros where nothing came
    assert gradient.landing is None  # whoever has read it has waited


@EVERYWHERE
@DTYPES
def test_passes_add_up_in_fp32(bench, tier, dtype):
    gradient = bench.gradient(HOMES[tier], dtype)
    parts = [grads(seed, dtype) for seed in range(3)]
    for given in parts:
        run_pass(gradient, given)
    expected = sum(laid_out(bench.group, given, dtype).float() for given in parts)
    value = looked_at(gradient)
    assert value.dtype is torch.float32
    assert torch.equal(value, expected)


@EVERYWHERE
@DTYPES
def test_pieces_of_a_pass_are_one_pass(bench, tier, dtype):
    """Where room is short a part of a gradient is reduced before the rest is in: the same bits, and no more memory."""
    gradient, given = bench.gradient(HOMES[tier], dtype), grads(1, dtype)
    run_pass(gradient, given)
    whole, live = looked_at(gradient), bench.live()
    gradient.clear()
    run_pass(gradient, {2: given[2]})
    run_pass(gradient, {0: given[0]}, finish=False)
    run_pass(gradient, {1: given[1]})
    assert torch.equal(looked_at(gradient).to(dtype), whole)
    assert gradient.present == {0, 1, 2}
    if tier != "disk":  # there it is a sum in fp32, for which disk_bytes has room
        assert gradient.passes == 1
        assert gradient.read().dtype is dtype
        assert bench.live() == live
    run_pass(gradient, grads(2, dtype))
    assert torch.equal(looked_at(gradient), whole.float() + laid_out(bench.group, grads(2, dtype), dtype).float())


@EVERYWHERE
@DTYPES
def test_a_step_begins_anew_in_the_memory_that_is_there(bench, tier, dtype):
    """Two passes, clear, one pass, clear, two passes: each the same as in a new gradient, and nothing grows."""
    gradient = bench.gradient(HOMES[tier], dtype)
    empty = bench.live()
    for seed in (1, 2):
        run_pass(gradient, grads(seed, dtype))
    gradient.clear()
    kept = bench.live()
    assert kept["device"] == empty["device"]
    item = {"host": dtype.itemsize, "disk": 4}.get(tier, 0)  # what arrives, on disk what a sum takes
    assert kept[tier] - empty[tier] == item * bench.group.own_numel
    for seeds in ([3], [4, 5], [6]):
        for seed in seeds:
            run_pass(gradient, grads(seed, dtype))
        one = dtype if len(seeds) == 1 else torch.float32
        expected = sum(laid_out(bench.group, grads(seed, dtype), dtype).to(one) for seed in seeds)
        assert torch.equal(looked_at(gradient), expected)
        gradient.clear()
        assert not gradient.held
        assert bench.live() == kept


@EVERYWHERE
@DTYPES
def test_forgotten_gradients_are_zeros_for_whoever_reads_or_adds(bench, tier, dtype):
    gradient = bench.gradient(HOMES[tier], dtype)
    first, second = grads(1, dtype), grads(2, dtype)
    run_pass(gradient, first)
    gradient.forget({1})
    assert gradient.square_sum is None
    kept = {0: first[0], 2: first[2]}
    assert torch.equal(looked_at(gradient), laid_out(bench.group, kept, dtype))
    gradient.forget({2})
    run_pass(gradient, second)
    expected = laid_out(bench.group, {0: first[0]}, dtype).float() + laid_out(bench.group, second, dtype).float()
    assert torch.equal(looked_at(gradient), expected)


@EVERYWHERE
def test_a_pass_is_forgotten_on_its_way(bench, tier):
    gradient = bench.gradient(HOMES[tier], torch.bfloat16)
    before = bench.live()["device"]
    run_pass(gradient, grads(1, torch.bfloat16))
    run_pass(gradient, grads(2, torch.bfloat16), finish=False)
    assert gradient.phase is Phase.LEAVING
    gradient.clear()
    assert gradient.phase is Phase.IDLE
    assert not gradient.held
    assert bench.live()["device"] == before
    run_pass(gradient, grads(3, torch.bfloat16))
    assert torch.equal(looked_at(gradient), laid_out(bench.group, grads(3, torch.bfloat16), torch.bfloat16))


def test_what_is_measured_on_the_way_is_what_would_be_measured_later(bench):
    gradient = bench.gradient(DISK, torch.bfloat16)
    for seed in (1, 2):  # as it arrives, and as a sum
        run_pass(gradient, grads(seed, torch.bfloat16))
        part = counted_part(looked_at(gradient), bench.group, rank=0)
        assert torch.equal(gradient.square_sum, SquareSum(part, lambda: bench.pool).tensor())


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_gradient_that_the_disk_does_not_take_is_lost_until_it_is_cleared(bench, passes_before):
    gradient = bench.gradient(DISK, torch.bfloat16)
    before = bench.live()["device"]
    for seed in range(passes_before):
        run_pass(gradient, grads(seed, torch.bfloat16))
    bench.engine.inject_fault("write", 0, 1 << 30, errno.ENOSPC)
    with pytest.raises(OSError, match=r"keeping the gradient of group layers\.0"):
        run_pass(gradient, grads(7, torch.bfloat16))
    bench.engine.inject_fault("write", 0, 0, errno.ENOSPC)
    assert bench.live()["device"] == before
    run_pass(gradient, grads(8, torch.bfloat16))  # a sum without the lost pass would be wrong
    assert not gradient.held
    for look in (gradient.check, gradient.read, lambda: gradient.source):
        with pytest.raises(OSError, match=r"keeping the gradient of group layers\.0"):
            look()
    gradient.clear()
    gradient.check()
    run_pass(gradient, grads(9, torch.bfloat16))
    assert torch.equal(looked_at(gradient), laid_out(bench.group, grads(9, torch.bfloat16), torch.bfloat16))


def test_a_sum_without_room_on_the_host_is_tried_again(bench):
    gradient = bench.gradient(HOST, torch.bfloat16)
    first, second = grads(1, torch.bfloat16), grads(2, torch.bfloat16)
    run_pass(gradient, first)
    ledger = bench.tiers.host.ledger
    ledger.budget_bytes = ledger.live_bytes
    with pytest.raises(BudgetError):
        run_pass(gradient, second, finish=False)
    assert gradient.phase is Phase.REDUCING
    with pytest.raises(BudgetError):
        gradient.finish_reduce()
    assert torch.equal(looked_at(gradient), laid_out(bench.group, first, torch.bfloat16))  # what was held is whole
    ledger.budget_bytes = None
    gradient.finish_reduce()
    expected = laid_out(bench.group, first, torch.bfloat16).float() + laid_out(bench.group, second, torch.bfloat16).float()
    assert torch.equal(looked_at(gradient), expected)


@EVERYWHERE
def test_nothing_is_read_where_nothing_is_held(bench, tier):
    gradient = bench.gradient(HOMES[tier], torch.float32)
    run_pass(gradient, grads(1, torch.float32))
    gradient.clear()
    for look in (gradient.read, lambda: gradient.source, lambda: gradient.value):
        with pytest.raises(RuntimeError, match=r"group layers\.0 holds no reduced gradient"):
            look()


def test_a_gradient_on_disk_is_not_a_tensor(bench):
    gradient = bench.gradient(DISK, torch.float32)
    run_pass(gradient, grads(1, torch.float32))
    with pytest.raises(RuntimeError, match=r"the gradient of group layers\.0 is on disk"):
        _ = gradient.value


def test_a_gradient_leaves_once(bench):
    gradient = bench.gradient(HOST, torch.float32)
    with pytest.raises(RuntimeError, match=r"layers\.0 is idle, expected reducing"):
        gradient._leave()
    run_pass(gradient, grads(1, torch.float32), finish=False)
    with pytest.raises(RuntimeError, match=r"layers\.0 is leaving, expected reducing"):
        gradient._leave()


def test_what_is_not_filled_is_not_used(bench):
    gradient = bench.gradient(DEVICE, torch.float32)
    with pytest.raises(RuntimeError, match=r"gradients of group layers\.0 have no flat buffer"):
        gradient.keep_local()
    own = Accumulator(bench.group, bench.tiers, torch.float32)
    for use in (own.keep_local, own.complete, lambda: own.take(1, torch.ones(50))):
        with pytest.raises(RuntimeError, match=r"gradients of group layers\.0 have no flat buffer"):
            use()
    own.begin(None)
    with pytest.raises(RuntimeError, match=r"gradients of group layers\.0 are being filled already"):
        own.begin(None)
    own.clear()


def test_gradients_that_wait_for_their_copy_are_added_to_dropped_and_forgotten(bench):
    gradient, given = bench.gradient(DEVICE, torch.float32), grads(7, torch.float32)
    for slot, grad in given.items():
        gradient.take(slot, grad)
    gradient.take_in(1, lambda target, fresh: target.add_(1) if not fresh else target.fill_(1))
    gradient.drop_pending({0})
    gradient.begin_reduce(gradient.pending)
    gradient.finish_reduce()
    assert torch.equal(looked_at(gradient), laid_out(bench.group, {1: given[1] + 1, 2: given[2]}, torch.float32))
    gradient.clear()

    kept = torch.ones(50)
    gone = weakref.ref(kept)
    gradient.take(1, kept)
    gradient.clear()
    del kept
    assert gone() is None, "what nobody wants takes no memory"


def test_gradients_with_a_graph_of_their_own_leave_it_behind(bench):
    gradient, weight = bench.gradient(DEVICE, torch.float32), torch.ones(50, requires_grad=True)
    grad = weight * 3
    with torch.no_grad():
        gradient.take(1, grad)
    with torch.enable_grad():  # as at the end of a backward with create_graph=True
        gradient.begin_reduce(gradient.pending)
        gradient.finish_reduce()
    assert not gradient.value.requires_grad
    assert torch.equal(gradient.value, laid_out(bench.group, {1: torch.full((50,), 3.0)}, torch.float32))


def test_a_reduction_is_not_released_on_its_way(bench):
    ranks = Twins()
    bench.gradient(DEVICE, torch.float32, ranks, stage=2)
    reducer = Reducer(bench.group, bench.tiers.device, ranks, torch.float32, everywhere=False)
    before = bench.live()["device"]
    reduction = reducer.begin(None)
    assert bench.live()["device"] - before == reducer.nbytes + 4 * bench.group.layout.padded_numel
    with pytest.raises(RuntimeError, match=r"gradients of layers\.0.*still on their way over the ranks"):
        reduction.release()
    reduction.discard()
    assert bench.live()["device"] == before


# -- several ranks ----------------------------------------------------------------------------------------------------


def own_run(group, flat):
    return flat[group.own_start : group.own_start + group.own_numel]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_the_average_of_each_stage(bench, stage, tier, dtype):
    """Twice the same, divided by two: the bits that were sent."""
    ranks = Twins()
    gradient = bench.gradient(HOMES[tier], dtype, ranks, stage)
    for seeds in ([1], [2, 3]):
        for seed in seeds:
            room, before = gradient.flat_bytes, bench.live()["device"]
            run_pass(gradient, grads(seed, dtype))
            assert bench.live()["device"] - before <= room
        one = dtype if len(seeds) == 1 else torch.float32
        expected = sum(laid_out(bench.group, grads(seed, dtype), dtype).to(one) for seed in seeds)
        assert torch.equal(looked_at(gradient), own_run(bench.group, expected))
        gradient.clear()
    assert ranks.calls == (["reduce-scatter", "all-gather"] if stage == 0 else ["reduce-scatter"]) * 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_pieces_over_ranks(bench, stage, tier, dtype):
    gradient, given = bench.gradient(HOMES[tier], dtype, Twins(), stage), grads(1, dtype)
    run_pass(gradient, {2: given[2]})
    run_pass(gradient, {0: given[0], 1: given[1]})
    assert gradient.passes == 1
    assert torch.equal(gradient.read().to(dtype), own_run(bench.group, laid_out(bench.group, given, dtype)))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_piece_that_brings_more_than_was_said_is_added(bench, tier):
    """By script a rank takes part in what was recorded; another one may have sent more than that."""
    gradient, given = bench.gradient(HOMES[tier], torch.bfloat16, Twins()), grads(1, torch.bfloat16)
    run_pass(gradient, {0: given[0], 1: given[1]})
    for slot in (0, 2):
        gradient.take(slot, given[slot])
    gradient.begin_reduce({2})
    expected = laid_out(bench.group, given, torch.bfloat16).float()
    expected += laid_out(bench.group, {0: given[0]}, torch.bfloat16).float()
    assert torch.equal(looked_at(finished(gradient)).float(), own_run(bench.group, expected))


def finished(gradient):
    gradient.finish_reduce()
    return gradient


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_reduction_that_cannot_begin_changes_nothing(bench, stage, dtype):
    ranks = Twins()
    gradient, given = bench.gradient(HOST, dtype, ranks, stage), grads(1, dtype)
    for slot, grad in given.items():
        gradient.take(slot, grad)
    ledger, scatter = bench.tiers.device.ledger, ranks.reduce_scatter
    before = gradient.passes, gradient.serial, set(gradient.present), set(gradient.pending), ledger.live_bytes
    ledger.budget_bytes = ledger.live_bytes
    with pytest.raises(BudgetError):
        gradient.begin_reduce(gradient.pending)
    ledger.budget_bytes = None
    ranks.reduce_scatter = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        gradient.begin_reduce(gradient.pending)
    ranks.reduce_scatter = scatter
    assert before == (gradient.passes, gradient.serial, gradient.present, gradient.pending, ledger.live_bytes)
    assert gradient.phase is Phase.IDLE
    gradient.begin_reduce(gradient.pending)
    assert torch.equal(finished(gradient).read(), own_run(bench.group, laid_out(bench.group, given, dtype)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_rank_that_serves_keeps_its_own_gradients(bench, stage, tier):
    gradient = bench.gradient(HOMES[tier], torch.float32, Twins(), stage)
    before = bench.live()["device"]
    given = grads(1, torch.float32)
    gradient.take(0, given[0])
    gradient.begin_reduce({1}, contribute=False)
    assert gradient.pending == {0}
    gradient.take(1, given[1])
    assert torch.equal(looked_at(gradient), torch.zeros(bench.group.own_numel))
    gradient.take(2, given[2])
    gradient.begin_reduce(gradient.pending)
    gradient.finish_reduce()
    assert gradient.passes == 2
    assert torch.equal(looked_at(gradient), own_run(bench.group, laid_out(bench.group, given, torch.float32)))
    gradient.clear()
    assert bench.live()["device"] == before


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_pass_that_follows_a_reduction_under_way_takes_its_flat_buffer(bench, stage):
    """What ``flat_bytes`` asks room for is what taking a gradient and reducing it adds, the first pass' buffers given back."""
    gradient = bench.gradient(DEVICE, torch.float32, Twins(), stage)
    run_pass(gradient, grads(1, torch.float32), finish=False)
    room, before = gradient.flat_bytes, bench.live()["device"]
    assert room == 4 * bench.group.layout.shard_numel  # what it is reduced to
    run_pass(gradient, grads(2, torch.float32), finish=False)
    assert bench.live()["device"] - before == room
    gradient.clear()


def test_local_sums_go_with_the_next_reduction(bench):
    """Passes inside ``no_sync``, of which one parameter's gradient is dropped again."""
    gradient = bench.gradient(DEVICE, torch.bfloat16, Twins(), stage=2)
    before = bench.live()["device"]
    parts = [grads(seed, torch.bfloat16) for seed in range(3)]
    for given in parts[:2]:
        for slot, grad in given.items():
            gradient.take(slot, grad)
        gradient.keep_local()
    assert (gradient.arrived, gradient.pending) == (set(), {0, 1, 2})
    assert bench.live()["device"] - before == 4 * bench.group.layout.padded_numel  # the sum, in fp32
    gradient.drop_pending({1})
    run_pass(gradient, {0: parts[2][0]})
    assert (gradient.present, gradient.pending) == ({0, 2}, set())
    assert bench.live()["device"] - before == 2 * bench.group.own_numel  # of the local sum nothing is left
    flats = [laid_out(bench.group, given, torch.bfloat16) for given in ({0: p[0], 2: p[2]} for p in parts[:2])]
    local = flats[0].float() + flats[1].float() + laid_out(bench.group, {0: parts[2][0]}, torch.bfloat16).float()
    assert torch.equal(looked_at(gradient), own_run(bench.group, local.to(torch.bfloat16)))
    gradient.clear()
    assert bench.live()["device"] == before


@EVERYWHERE
def test_what_is_held_says_where_it_is(bench, tier):
    """Host: the place is known before the copy has ended, and the ticket says when it has."""
    gradient = bench.gradient(HOMES[tier], torch.float32)
    place = gradient._place
    assert place.holding is Holding.NOTHING
    run_pass(gradient, grads(1, torch.float32))
    if tier == "host":
        assert place.holding is Holding.LANDING
        gradient.landing.wait()
        assert torch.equal(gradient.value, laid_out(bench.group, grads(1, torch.float32), torch.float32))
        gradient.await_landing()
    assert place.holding is Holding.LANDED
    assert gradient.landing is None
