"""When an update ahead of its step is likely to be of use, and in which way it is done. Pure: knows what the steps were like,
and what takes how much memory.

[Note: when to speculate]
What runs ahead of ``step`` is lost when the step clips, or when another backward comes first. Both are habits of a training
loop, so the last steps say what the next one will be like. A loop that clips nothing is trusted after its first step (which
takes its memory before shadows do), one that may clip when ``QUIET_SHARE`` of its last ``CLIP_MEMORY`` steps did not. So it
goes on at once after a step that clips, where such steps are rare, and waits where they are the rule. After someone needed the
memory of the shadows there are none for ``REST_STEPS`` steps.

What a miss costs: the update into a shadow ran beside backward, and the step updates as if it had not. A miss in place with
a journal (optim/journaled.py) costs half an update more; a hit saves a whole one, so it would pay from a third of the steps on.
On disk what is written in vain takes the drive's time from the updates that come after it, so there none of the last
``CLIP_MEMORY`` steps may have clipped.

[Note: which way]
A shadow is the fastest way, but takes as much memory as the states, a journal takes a seventh of that, waiting for the step
none. As many groups as there is room for are updated ahead, the first ones of the model before others; of these, again the
first ones get a shadow in the place of a journal, as far as the rest of the room goes.
"""

import enum
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

CLIP_MEMORY = 8
"""Steps that may clip and are remembered. On disk: as many without clipping make speculation pay again."""
QUIET_SHARE = 4
"""Of the last ``CLIP_MEMORY`` steps: as many without clipping make speculation in memory pay."""
REST_STEPS = 50
"""Steps without speculation after someone needed the memory of the shadows."""


class SpeculationPolicy:
    """See [Note: when to speculate]."""

    def __init__(self) -> None:
        self._quiet_steps = 0
        self._rest_steps = 0
        self._last: deque[bool] = deque(maxlen=CLIP_MEMORY)
        """Of steps that may clip: whether they left their gradients as they were."""

    def stepped(self, passes: int, clips: bool, changed: bool = False) -> None:
        """A step with the sum of ``passes`` backwards. ``clips``: it measures its gradients and may scale them; by how much is
        said by ``scaled_by``, when it is known. ``changed``: someone has changed them between backward and step."""
        self._rest_steps = max(0, self._rest_steps - 1)
        if passes > 1 or changed:
            self._quiet_steps = 0
            self._last.clear()
        elif not clips:
            self._quiet_steps = CLIP_MEMORY

    def scaled_by(self, factor: float) -> None:
        """What the last step of a single backward has multiplied its gradients with. 1: it has left them as they were."""
        self._quiet_steps = self._quiet_steps + 1 if factor == 1.0 else 0
        self._last.append(factor == 1.0)

    def reclaimed(self) -> None:
        """The memory of the shadows was needed for something else."""
        self._rest_steps = REST_STEPS

    @property
    def wanted(self) -> bool:
        """Whether what is computed ahead now, in host memory, is likely enough to be committed."""
        often = self._quiet_steps >= CLIP_MEMORY or sum(self._last) >= QUIET_SHARE
        return often and self._rest_steps == 0

    @property
    def wanted_on_disk(self) -> bool:
        """The same where the drive is written to in vain otherwise."""
        return self._quiet_steps >= CLIP_MEMORY and self._rest_steps == 0


class Way(enum.Enum):
    """How a group is updated. See [Note: which way]."""

    SHADOW = "out of place"
    JOURNAL = "in place, with a way back"
    WAIT = "at the step"


class Room(NamedTuple):
    """What the ways of one group take."""

    shadow_bytes: float
    journal_bytes: float
    """Infinite: there is none for it."""


def choose_ways(groups: Sequence[Room], room_bytes: float) -> list[Way]:
    """A way for each group, in the order of the model."""
    found = [Way.WAIT] * len(groups)
    for index, group in enumerate(groups):
        if min(group) > room_bytes:
            break
        found[index] = Way.SHADOW if group.shadow_bytes <= group.journal_bytes else Way.JOURNAL
        room_bytes -= min(group)
    for index, group in enumerate(groups):
        if found[index] is Way.WAIT or group.shadow_bytes - min(group) > room_bytes:
            break
        found[index] = Way.SHADOW
        room_bytes -= group.shadow_bytes - min(group)
    return found
