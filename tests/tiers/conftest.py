"""Fixtures of the tier tests."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tier_tools import Child, Tiers

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture
def tiers(tmp_path, device) -> Iterator[Tiers]:
    made = Tiers(tmp_path, device)
    yield made
    made.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts processes; those still running at the end of the test are killed."""
    started: list[Child] = []

    def start(code: str, *arguments: object) -> Child:
        started.append(Child(code, *arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()
