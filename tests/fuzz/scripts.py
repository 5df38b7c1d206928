"""What ``fuzz.ranks`` plays: a model, a plan and a training loop, written down step by step.

Every rank, every plan and plain PyTorch play the same script.
"""

from dataclasses import dataclass

import torch

from fuzz.blocks import Shape


@dataclass(frozen=True, kw_only=True)
class Way:
    """How one rank goes through the model once."""

    order: tuple[int, ...]
    """The blocks that it calls, one after the other: maybe none, maybe one several times."""
    experts: tuple[tuple[int, ...], ...]
    """For each call: the experts that it uses."""
    fails_at: int
    """The call where a failing pass fails."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward and its backward."""

    ways: tuple[Way, ...]
    """Of each rank."""
    evaluates: bool
    """Without gradients once more, between forward and backward."""
    quiet: bool
    """Inside ``no_sync``, where the step's mode has it and it is not the last pass."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank raises in one pass, and the attempt is dropped."""

    rank: int
    number: int
    where: str
    """"forward" or "backward"."""


@dataclass(frozen=True, kw_only=True)
class Deed:
    """Something that the loop does apart from passes and updates: see ``fuzz.deeds``."""

    name: str
    share: float = 1.0
    """Of the parameters: each is touched with this probability."""
    value: float = 0.0
    """A learning rate, a norm; or 1 for "to None"."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """From one update to the next."""

    freezes: tuple[int, bool] | None
    """A block, and whether it is trained from here on."""
    failure: Failure | None
    mode: str
    """"apart"; "quiet" (``no_sync``); "retained": each graph twice; "forwards first"; "joint": one backward for all passes."""
    passes: tuple[Pass, ...]
    before: tuple[Deed, ...]
    """Between the passes and the update."""
    action: str
    """"step", "step twice", "skip" (the gradients are dropped) or "carry" (they stay for the next step)."""
    zero: str
    """What drops the gradients after the update: the optimizer "to None" or "to zero", the "model", or "nothing"."""
    after: tuple[Deed, ...]
    looks: bool
    """Whether all values are compared after this step, and not at the end alone."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """A plan apart from its precision, and how near to the smallest budgets it is."""

    stage: int = 3
    tiers: tuple[tuple[str, str], ...] = (("params", "device"), ("optimizer", "device"))
    activations: str = "auto"
    device_share: float | None = None
    """The device's budget, as a multiple of the smallest that is accepted. None: no budget."""
    host_share: float | None = None

    @property
    def is_tight(self):
        return self.device_share is not None or self.host_share is not None


@dataclass(frozen=True, kw_only=True)
class Case:
    seed: int
    world: int
    shape: Shape
    script: tuple[Step, ...]
    most_passes: int
    order: str
    """In which order ranks call the blocks: "same" for all of them, or drawn for each."""
    dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    reduce_op: str
    tiles: int | None
    optimizer: str
    """"AdamW", "two AdamW" (each with half of the parameters), "wrapped AdamW" or "wrapped SGD"."""
    in_backward: bool
    """AdamW with ``update_in_backward``."""
    clip: float | None
    places: Places
    speculate: bool | str

    @property
    def freezes(self):
        return any(step.freezes is not None for step in self.script)

    @property
    def ranks_go_apart(self):
        """Ranks use other modules, or in another order: their gradients may be summed in another order, too."""
        return self.order != "same" or "experts" in self.shape.kinds

    @property
    def rounds_by_places(self):
        """Results depend on the plan in the last bit: norms are summed group by group, sums of three ranks in any order, what
        ``no_sync`` adds up on a rank is rounded once, and where room is short the gradient of a tile that is used several times
        is reduced several times (docs/tiling.md)."""
        clips = any(deed.name.startswith("clip") for step in self.script for deed in step.before)
        again = "twice" in self.shape.kinds or any(step.mode == "joint" for step in self.script)
        early = self.tiles is not None and self.places.is_tight and again
        return self.clip is not None or clips or self.world > 2 or early or any(step.mode == "quiet" for step in self.script)
