"""References are computed with one thread, wherever a test asks for them and whatever ran before."""

import pytest
import torch


@pytest.fixture(scope="module")
def threads_of_a_file():
    """Fixtures of a file come before those of a test."""
    return torch.get_num_threads()


def test_a_trainer_sets_its_threads():
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_fixtures_of_a_file_have_one_thread(threads_of_a_file):
    assert threads_of_a_file == 1
