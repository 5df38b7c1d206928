"""A plan that cannot be carried out is refused where it is written."""

import pytest

from unwall import Plan, PlanError


@pytest.mark.parametrize("disk", ["", ("",), ("/tmp", ""), 3, b"/tmp", "a\0b"])
def test_a_disk_that_is_no_directory_is_refused(disk):
    with pytest.raises(PlanError, match="disk is a directory, or a tuple of several"):
        Plan(disk=disk)


@pytest.mark.parametrize("disk", [None, ()])
def test_a_state_on_disk_needs_a_directory(disk):
    with pytest.raises(PlanError, match="no directory is given"):
        Plan(params="disk", disk=disk)
