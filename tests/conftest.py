"""Fixtures of all tests that train something."""

from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import RankPool


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The plain reference runs here and the ranks elsewhere: with one thread each, their kernels add in the same order. Before
    each test, as trainers set it, too; and before the fixtures of its file, which train references as well."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)``: the pool of n ranks of this file, started when first asked for."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield pool
    for started in pools.values():
        started.close()
