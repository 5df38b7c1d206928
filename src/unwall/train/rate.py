"""The learning rate of each step."""

import math


def rate_at(step: int, steps: int, peak: float, warmup: float, schedule: str) -> float:
    """Of step 1 to ``steps``. ``warmup``: steps, or below 1 a share of them; ``cosine`` and ``linear`` end near zero."""
    rising = warmup if warmup >= 1 else math.ceil(warmup * steps)
    if step <= rising:
        return peak * step / (rising + 1)
    if schedule == "constant":
        return peak
    done = (step - rising - 1) / max(1.0, steps - rising)
    return peak * (1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)
