"""Host memory: exact, zeroed, given back."""

import gc
import mmap

import numpy as np
import pytest
import torch
from pages import mapped, newly_mapped, resident

from unwall.native.memory import HostMemory
from unwall.native.pool import WorkerPool

MIB = 1 << 20


@pytest.fixture
def pool():
    with WorkerPool(2) as made:
        yield made


@pytest.mark.parametrize("nbytes", [1, 4095, 4097, 2 * MIB, 5 * MIB + 3, 40 * MIB])
@pytest.mark.parametrize("touched", [True, False])
def test_memory_is_zero_aligned_and_writable(pool, nbytes, touched):
    memory = HostMemory(nbytes, pool if touched else None)
    assert memory.nbytes == nbytes
    assert memory.address % mmap.PAGESIZE == 0
    view = np.frombuffer(memory.buffer(), dtype=np.uint8)
    assert view.size == nbytes
    assert not view.any()
    view[:] = 7
    assert (view == 7).all()


def test_large_memory_starts_on_a_huge_page(pool):
    assert HostMemory(4 * MIB, pool).address % (2 * MIB) == 0


def test_pool_brings_the_pages_in_and_the_last_reference_gives_them_back(pool):
    nbytes = 256 * MIB + 4096
    memory = HostMemory(nbytes, pool)
    address = memory.address
    assert resident(address, nbytes) == nbytes
    del memory
    assert resident(address, nbytes) < 16 * MIB


def test_without_a_pool_pages_come_with_the_first_write():
    memory = HostMemory(256 * MIB)
    assert resident(memory.address, memory.nbytes) == 0
    view = torch.frombuffer(memory.buffer(), dtype=torch.uint8)
    view[: 64 * MIB].fill_(1)
    assert 64 * MIB <= resident(memory.address, memory.nbytes) < 80 * MIB


def test_exact_size_is_mapped(pool):
    """Not the next power of two, as the allocators of pinned memory do. What Python takes meanwhile may lie beside it."""
    HostMemory(65 * MIB + 1, pool)  # what the workers take at first use is there
    before = mapped()
    memory = HostMemory(65 * MIB + 1, pool)
    assert 65 * MIB < newly_mapped(before, memory.address) < 80 * MIB


def test_views_keep_the_mapping_alive(pool):
    owners = [HostMemory(64 * MIB, pool), HostMemory(64 * MIB, pool)]
    kept, given_back = (owner.address for owner in owners)
    tensor = torch.frombuffer(owners[0].buffer(), dtype=torch.float32)
    array = np.frombuffer(owners[1].buffer(), dtype=np.int64)[5:10]
    owners.clear()
    gc.collect()
    tensor.fill_(3.0)
    assert tensor.sum() == 3.0 * tensor.numel()
    array[:] = 9
    assert array.tolist() == [9] * 5
    part = tensor.view(-1)[100:200]
    del tensor, array
    gc.collect()
    assert part.sum() == 300
    assert resident(kept, 64 * MIB) == 64 * MIB
    assert resident(given_back, 64 * MIB) < 16 * MIB
    del part
    gc.collect()
    assert resident(kept, 64 * MIB) < 16 * MIB


def test_the_buffer_outlives_its_owner(pool):
    memory = HostMemory(MIB, pool)
    first, second = memory.buffer(), memory.buffer()
    del memory
    gc.collect()
    first[17] = 5
    assert second[17] == 5


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_that_make_no_sense_are_refused(nbytes):
    with pytest.raises(ValueError, match=str(nbytes)):
        HostMemory(nbytes)


def test_more_than_the_machine_has_is_a_memory_error(pool):
    with pytest.raises(MemoryError, match="host memory"):
        HostMemory(1 << 56, pool)
    with pytest.raises(MemoryError, match="host memory"):
        HostMemory(1 << 56)


def test_a_closed_pool_is_refused():
    pool = WorkerPool(1)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        HostMemory(4096, pool)


def test_throttle_does_not_slow_allocation(pool):
    pool.throttle(1.0)
    assert HostMemory(64 * MIB, pool).nbytes == 64 * MIB
