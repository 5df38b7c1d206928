"""A card that is counted instead of measured: what autograd and operations hold, tensor by tensor, and what the ledger has.

So the code for accelerators, which reads the allocator, can be tried where there is none.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from unwall.runtime import activations
from unwall.runtime.card import SmallerCard
from unwall.schedule.limit import Allocated
from unwall.tiers.device import DeviceTier


class CountedCard(TorchDispatchMode):
    """While it is entered each storage that an operation makes counts until it goes. What the tiers hand out does not: the
    device's ledger knows of it, and the host's is on no card."""

    def __init__(self):
        super().__init__()
        self.ours = lambda: 0
        self.peak_bytes = self.failures = 0
        self.most_bytes = 0
        """The peak since whoever looks at it set it to 0; nobody resets the other one, as nobody resets an allocator's."""
        self._known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {_key(value) for value in tree_leaves((args, kwargs or {}))}
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor) and _key(value) not in given:
                self._count(value)
        self.sample()
        return found

    def _count(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._known.pop, storage._cdata).atexit = False

    @property
    def others_bytes(self):
        """Added up anew: storages go in other threads, too (gloo's)."""
        return sum(list(self._known.values()))

    def sample(self):
        now = self.others_bytes + self.ours()
        self.peak_bytes, self.most_bytes = max(self.peak_bytes, now), max(self.most_bytes, now)

    # -- what schedule/limit.py asks of a card ------------------------------------------------------------------------

    def free_bytes(self):
        return 1 << 60

    def allocated(self):
        self.sample()
        now = self.others_bytes + self.ours()
        return Allocated(now, now, self.peak_bytes, self.failures)


def put_in(monkeypatch):
    """From now on ``device_bytes`` is so much of a counted card, as it is of an accelerator."""
    card = CountedCard()
    take = DeviceTier._take

    def taken(self, request):
        with _disable_current_modes():
            return take(self, request)

    def card_of(plan_bytes, _device, ours, _held):
        card.ours = ours
        return card if plan_bytes is None else SmallerCard(card, plan_bytes)

    monkeypatch.setattr(DeviceTier, "_take", taken)
    monkeypatch.setattr(activations, "card_of", card_of)
    return card


def _key(value):
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.untyped_storage()._cdata
    return value._cdata if isinstance(value, torch.UntypedStorage) else None
