"""Which groups are on the device, or on their way to it."""

from collections.abc import Sequence

from unwall.schedule.backend import GroupBackend
from unwall.shards.group import Residence


class Present:
    """The groups that are on the device or on their way to it, as a container."""

    def __init__(self, groups: Sequence[GroupBackend]) -> None:
        self._groups = groups

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self._groups[index].residence is not Residence.ABSENT
