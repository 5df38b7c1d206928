"""What the tests of the native core share."""

import ctypes
import gc

import pytest

from unwall.native.library import function
from unwall.native.pool import WorkerPool, isa, select_isa


def _available():
    before, found = isa(), []
    for name in ("baseline", "avx2", "avx512"):
        try:
            select_isa(name)
        except ValueError:
            continue
        found.append(name)
    select_isa(before)
    return found


ISAS = _available()


@pytest.fixture(scope="module")
def garbage_collected():
    gc.collect()


@pytest.fixture
def no_ticket_left(garbage_collected):
    """Garbage is collected only where tickets seem to be left (an exception and the frames it went through hold each other):
    in a process that has run all the tests before, that takes long. What those tests have left may go meanwhile."""
    count = function("uw_ticket_count", ctypes.c_int64)
    before = count()
    yield
    if count() > before:
        gc.collect()
    assert count() <= before, "a test left tickets behind"


@pytest.fixture
def isas():
    """The instruction sets that this processor has."""
    return ISAS


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as made:
        yield made


@pytest.fixture(params=ISAS)
def each_isa(request):
    before = isa()
    select_isa(request.param)
    yield request.param
    select_isa(before)
