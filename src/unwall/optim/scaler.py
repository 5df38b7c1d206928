"""Dynamic loss scaling for fp16: large enough that small gradients survive, small enough that large ones do not overflow."""

from dataclasses import dataclass
from typing import Any

UNSCALED = (
    "a step with fp16 gradients whose loss was not scaled: gradients below 6e-8 are zero. Write "
    "optimizer.scale(loss).backward(), or use torch.amp.GradScaler, or Plan(compute_dtype=torch.bfloat16), which needs no scale"
)


@dataclass
class LossScaler:
    """Doubles the scale after ``growth_interval`` good steps, halves it after an overflow."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / 2, 2.0**-14)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
