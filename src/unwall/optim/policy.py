"""When an update ahead of its step is likely to be of use. Pure: knows what the steps were like, and nothing else.

[Note: when to speculate]
What runs ahead of ``step`` is lost when the step clips, or when another backward comes first. Both are habits of a training
loop, so the last steps say what the next one will be like. A loop that clips nothing is trusted after its first step (which
takes its memory before shadows do), one that may clip after ``CLIP_MEMORY`` steps in which it did not. After someone needed the
memory of the shadows there are none for ``REST_STEPS`` steps.
"""

CLIP_MEMORY = 8
"""Steps without clipping after which speculation pays again."""
REST_STEPS = 50
"""Steps without speculation after someone needed the memory of the shadows."""


class SpeculationPolicy:
    """See [Note: when to speculate]."""

    def __init__(self) -> None:
        self._quiet_steps = 0
        self._rest_steps = 0

    def stepped(self, passes: int, clips: bool, changed: bool = False) -> None:
        """A step with the sum of ``passes`` backwards. ``clips``: it measures its gradients and may scale them; by how much is
        said by ``scaled_by``, when it is known. ``changed``: someone has changed them between backward and step."""
        self._rest_steps = max(0, self._rest_steps - 1)
        if passes > 1 or changed:
            self._quiet_steps = 0
        elif not clips:
            self._quiet_steps = CLIP_MEMORY

    def scaled_by(self, factor: float) -> None:
        """What the last step of a single backward has multiplied its gradients with. 1: it has left them as they were."""
        self._quiet_steps = self._quiet_steps + 1 if factor == 1.0 else 0

    def reclaimed(self) -> None:
        """The memory of the shadows was needed for something else."""
        self._rest_steps = REST_STEPS

    @property
    def wanted(self) -> bool:
        """Whether what is computed ahead now is likely to be committed."""
        return self._quiet_steps >= CLIP_MEMORY and self._rest_steps == 0
