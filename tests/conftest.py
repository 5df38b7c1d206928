"""Fixtures of all tests that train something."""

import random
from collections.abc import Callable, Iterator

import hypothesis
import numpy as np
import pytest
import torch
from ranks import RankPool, forget_what_others_kept

# The same examples on every machine, however busy it is, and nothing written beside the tests.
hypothesis.settings.register_profile(
    "sure", deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("sure")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The plain reference runs here and the ranks elsewhere: with one thread each, their kernels add in the same order. Before
    each test, as trainers set it, too; and before the fixtures of its file, which train references as well. What a test draws
    without a seed, and what is remembered of the ones before, does not depend on which tests ran in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    forget_what_others_kept()


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
