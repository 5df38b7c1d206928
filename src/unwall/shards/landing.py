"""Where a group's reduced gradient waits for its update: on the device, on the host, or on disk.

[Note: landed]
The sum of a pass comes into being on the device. Two calls move it to its place: ``begin`` starts the move, ``finish`` makes it
a part of what is held and gives the memory on the device back. A gradient has *landed* when its bytes are in its place, so that
whoever reads there finds them. Before that it is *reduced* (the average is known), and on its way.

NOTHING  no gradient is held. Host and disk keep their place, where an update may still read what was held before.
LANDING  the copy is on its way, ``landing`` is its ticket. The place is known, but reading it must wait for the ticket.
LANDED   the sum of all passes so far is in its place.
USED     an update has used it, and it is not kept: reading raises. Its memory serves the next one. A further piece of the same
         backward may land after that, beside nothing: LANDING again, and still nobody but an update may read.
LOST     the place did not take it: reading raises why. Later passes are let go, because a sum without this one is of no use.

``clear`` leads to NOTHING from anywhere. Several passes before a step add up in fp32, in memory of their own.
"""

import enum
from contextlib import suppress
from typing import NoReturn

import torch

from unwall.shards.group import Group
from unwall.shards.layout import Segment
from unwall.shards.store import Store
from unwall.tiers.block import MemoryBlock
from unwall.tiers.ticket import Ticket
from unwall.tiers.tiers import Tiers

AGAIN_ADVICE = (
    "A parameter's gradient has come again before step(), perhaps because reentrant checkpoints share the parameter. "
    "Plan(passes=2) makes room for the sum. Or write use_reentrant=False."
)
"""For a sum that nobody has announced."""


class Holding(enum.Enum):
    """See [Note: landed]."""

    NOTHING = "nothing"
    LANDING = "landing"
    LANDED = "landed"
    USED = "used"
    LOST = "lost"


class LandingPlace:
    """What all places share. ``dtype``: what gradients arrive in."""

    flat: MemoryBlock | None = None
    """On the device: the flat buffer, where that is kept between passes."""
    landing: Ticket | None = None
    """The copy on its way. None unless LANDING."""
    square_sum: torch.Tensor | None = None
    """Sum of squares of what this rank counts, measured while it passed. None: not measured, or not valid any more."""
    gone = False
    """A part of it, or all, was used and not kept."""

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype) -> None:
        self.holding = Holding.NOTHING
        self._group = group
        self._tiers = tiers
        self._dtype = dtype

    def begin(self, incoming: MemoryBlock, beside: list[Segment] | None = None) -> None:
        """The average of a pass is in ``incoming``: starts to move it. May be called again if it fails.

        ``beside``: it is a further piece of what is held, these parts of it count, and nothing is there in their place yet.
        """
        raise NotImplementedError

    def finish(self, incoming: MemoryBlock, flat: MemoryBlock | None) -> None:
        """What was begun counts from now on. Both blocks belong to the place. ``flat``: the buffer that was sent."""
        raise NotImplementedError

    @property
    def source(self) -> Store | torch.Tensor:
        """Where the gradient is. Whoever reads there waits for ``landing`` first."""
        self.check()
        if self.holding is Holding.NOTHING:
            raise RuntimeError(f"group {self._group.name} holds no reduced gradient: run backward first")
        if self.holding is Holding.USED:
            self._refuse_gone()
        return self._source()

    def _refuse_gone(self) -> NoReturn:
        raise RuntimeError(
            f"the gradient of group {self._group.name} is gone: update_in_backward=True has used it, and Plan(grads="
            "'transient') keeps none. To look at gradients, or to change them, use Plan(grads='auto')"
        )

    def _source(self) -> Store | torch.Tensor:
        raise NotImplementedError

    def read(self, write: bool = False) -> torch.Tensor:
        """The gradient as a tensor, landed. Without ``write`` it must not be changed."""
        if self.gone:
            self._refuse_gone()
        return self.rest(write)

    def rest(self, write: bool = False) -> torch.Tensor:
        """The same of what is there, where a part is gone."""
        source = self.source
        self.await_landing()
        return source.tensor(write) if isinstance(source, Store) else source

    def check(self) -> None:
        """Raises where the gradient is LOST."""

    def await_landing(self) -> None:
        """LANDING to LANDED."""
        if self.landing is not None:
            self.landing.wait()
            self.landing = None
            self.holding = Holding.LANDED if self.holding is Holding.LANDING else self.holding

    @property
    def lends(self) -> bool:
        """Whether it lies in memory that others wait for."""
        return False

    def take_flat(self) -> MemoryBlock | None:
        """Gives out the flat buffer, if there is one here, for a further pass."""
        return None

    @property
    def growth_bytes(self) -> int:
        """Device memory that a further pass needs for its sum."""
        return 0

    @property
    def sum_growth_bytes(self) -> int:
        """What of it stays, when what was held before is let go."""
        return 0

    @property
    def sum_bytes(self) -> int:
        """Host memory that a further pass takes for the sum of all."""
        return 0

    def abandon(self) -> None:
        """What was begun will not be finished. The copy has read ``incoming`` to its end."""
        with suppress(Exception):  # nobody wants it any more
            self.await_landing()

    def let_go(self) -> None:
        """LANDING or LANDED to USED: an update that is under way is the last to read it."""

    def clear(self) -> None:
        """Holds nothing any more."""
        self.holding, self.landing, self.square_sum, self.gone = Holding.NOTHING, None, None, False

    @property
    def _wide(self) -> torch.dtype:
        """What several passes add up in."""
        return torch.promote_types(self._dtype, torch.float32)


class OnDevice(LandingPlace):
    """Lands at once: as the memory it was reduced into, or, with ``keep_flat`` (stages 0 and 1), in the flat buffer, which then
    stays. A further pass moves it into fp32 memory of its own."""

    def __init__(self, group: Group, tiers: Tiers, dtype: torch.dtype, *, keep_flat: bool, transient: bool = False) -> None:
        super().__init__(group, tiers, dtype)
        self._keep_flat = keep_flat
        self._transient = transient
        self._value: torch.Tensor | None = None
        self._beside: list[Segment] | None = None
        self._block: MemoryBlock | None = None
        """The value's memory. None while it lies in the flat buffer."""

    def begin(self, incoming: MemoryBlock, beside: list[Segment] | None = None) -> None:  # noqa: ARG002 (it is where it belongs)
        self._beside = beside

    def finish(self, incoming: MemoryBlock, flat: MemoryBlock | None) -> None:
        if flat is not None and self._keep_flat:
            self.flat = flat
        elif flat is not None:
            self._tiers.device.free(flat)
        if self._value is None and self.flat is None:
            self._block, self._value = incoming, incoming.view(self._dtype)
        else:
            if self._value is not None and self._beside is not None:
                for segment in self._beside:
                    part = incoming.view(self._dtype).narrow(0, segment.shard_start, segment.numel)
                    self._value.narrow(0, segment.shard_start, segment.numel).copy_(part)
            elif self._value is not None:
                try:
                    total = self._widen()
                except BaseException:
                    self._tiers.device.free(incoming)
                    raise
                total.add_(incoming.view(self._dtype))
            elif self.flat is not None:
                self._value = self.flat.view(self._dtype).narrow(0, self._group.own_start, self._group.own_numel)
                self._value.copy_(incoming.view(self._dtype))
            self._tiers.device.free(incoming)
        self.holding = Holding.LANDED

    def _source(self) -> torch.Tensor:
        assert self._value is not None
        return self._value

    def take_flat(self) -> MemoryBlock | None:
        if self._value is not None and self._block is None:
            self._widen()
        flat, self.flat = self.flat, None
        return flat

    @property
    def growth_bytes(self) -> int:
        grows = self._value is not None and self._value.dtype.itemsize < 4
        return self._group.own_numel * 4 if grows else 0

    @property
    def sum_growth_bytes(self) -> int:
        freed = 0 if self._block is None else self._block.charged_bytes
        return max(0, self.growth_bytes - freed)

    def let_go(self) -> None:
        if self._transient:
            self.clear()
            self.holding, self.gone = Holding.USED, True

    def clear(self) -> None:
        super().clear()
        for block in (self._block, self.flat):
            if block is not None:
                self._tiers.device.free(block)
        self._value = self._block = self.flat = None

    def _widen(self) -> torch.Tensor:
        """Moves the value into fp32 memory of its own."""
        assert self._value is not None
        if self._block is None or self._value.dtype is not self._wide:
            label = f"gradient shard of {self._group.name}"
            wide = self._tiers.memory("device", self._value.numel(), self._wide, label)
            self._value = wide.view(self._wide).copy_(self._value)
            if self._block is not None:
                self._tiers.device.free(self._block)
            self._block = wide
        return self._value
