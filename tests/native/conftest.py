"""What the tests of the kernels share."""

import pytest

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
