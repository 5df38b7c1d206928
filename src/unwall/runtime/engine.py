"""Everything about one sharded model, in one place: its groups and gradients, what runs them, and what optimizers ask for."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from unwall.native.library import DiskError
from unwall.plans import Plan
from unwall.runtime.backward import Backward
from unwall.runtime.compute_lane import ComputeLane
from unwall.runtime.failures import FailureDomain
from unwall.runtime.forward import Forward
from unwall.runtime.leftovers import Free
from unwall.runtime.places import find_places
from unwall.runtime.shown import Shown
from unwall.schedule.agreement import Agreement
from unwall.schedule.executor import Executor
from unwall.shards.collectives import Ranks
from unwall.shards.gradient import Gradient
from unwall.shards.group import Group
from unwall.tiers.device import DeviceTier
from unwall.tiers.meter import LinkMeter
from unwall.tiers.tiers import Tiers


@dataclass
class Speculated:
    """How updates that ran ahead of their step ended."""

    committed: int = 0
    missed: int = 0


class Engine:
    """Everything unwall knows about one sharded model."""

    def __init__(self, plan: Plan, groups: list[Group], gradients: list[Gradient], tiers: Tiers, ranks: Ranks) -> None:
        self.plan = plan
        self.groups = groups
        self.gradients = gradients
        self.tiers = tiers
        self.ranks = ranks
        ranks.meter = LinkMeter("collective", tiers.links.timeline)
        self.lane = ComputeLane(tiers.links)
        names, device = [group.name for group in groups], tiers.device.device
        self.executor = Executor(
            groups, gradients, tiers.device.ledger, ranks.size, self.lane, lambda acts: Agreement(ranks, names, acts, device)
        )
        self.places = find_places(groups)
        """Where each parameter (by id) lies."""
        self.shown = Shown(self)
        """What ``.grad`` of each parameter shows."""
        self.backward = Backward(
            self.executor, self.places, self.shown.take, tiers.host.ledger, self.refuse_if_used, self._hand_out
        )
        self.forward = Forward(self.executor, ranks, self.places, self.backward, self._beginning)
        self.version = 0
        """Counts changes of the parameters' values."""
        self.lent: set[int] = set()
        """Parameters (by id) that are whole and the user's now, inside ``full_params``."""
        self.loading: set[int] = set()
        """Parameters (by id) that ``load_state_dict`` is writing."""
        self.loss_scale = 1.0
        """What the loss of the gradients held now was multiplied with."""
        self.speculation = Speculated()
        self.steps = 0
        """Optimizer steps since the statistics were reset."""
        self.listeners: list[weakref.WeakMethod[Callable[[Engine, int], None]]] = []
        """Told of each gradient that is reduced and on its way to its place, during backward."""
        self.guards: list[weakref.WeakMethod[Callable[[Engine, int], None]]] = []
        """Told of each gradient that arrives, or is changed by hand. They may refuse it."""
        self.lookers: list[weakref.WeakMethod[Callable[[Engine, int], None]]] = []
        """Told before someone looks at gradients or changes them: they do what they had put off until the step."""
        self.skipped = 0
        """Steps that were skipped because of gradients that were not finite, since the statistics were reset."""
        self.failures = FailureDomain()
        self.discarded: deque[Free] = deque()
        """How to free what optimizers that are gone have left here. See runtime/leftovers.py."""

    @property
    def device(self) -> DeviceTier:
        return self.tiers.device

    # -- optimizers that come and go ----------------------------------------------------------------------------------

    def listen(self, reduced: "Callable[[Engine, int], None]", guard: "Callable[[Engine, int], None] | None") -> None:
        """Tells an optimizer of gradients for as long as it lives."""
        for methods, method in ((self.listeners, reduced), (self.guards, guard)):
            methods[:] = [known for known in methods if known() is not None]
            if method is not None:
                methods.append(weakref.WeakMethod(method))

    def together(self, what: str) -> None:  # noqa: ARG002 (named where ranks are told apart)
        """Something that all ranks must call at once: ``what`` it is. DivergedError, not a hang, when one of them does not."""
        self.executor.together()

    def looked_at(self) -> None:
        """Someone is about to look at gradients, or to change them."""
        self._tell(self.lookers, 0)

    def refuse_if_used(self, index: int) -> None:
        """A group's gradient is about to be changed. Raises where an update has used it already."""
        self._tell(self.guards, index)

    def _tell(self, methods: "list[weakref.WeakMethod[Callable[[Engine, int], None]]]", index: int) -> None:
        for method in methods:
            call = method()
            if call is not None:
                call(self, index)

    def _hand_out(self) -> None:
        """Tells the optimizers which gradients are reduced. Here, and nowhere else in a pass, they may wait for an update."""
        for index in self.executor.take_reduced():
            self._tell(self.listeners, index)
        if not self.backward.running:
            self.shown.show()

    def free_discarded(self) -> None:
        """Frees what optimizers that are gone have left here. Called where waiting and locking is allowed."""
        for _ in range(len(self.discarded)):  # what cannot be freed yet adds itself again
            self.discarded.popleft()(self)

    def _beginning(self) -> None:
        """A pass begins."""
        self.free_discarded()
        if self.lent:
            raise RuntimeError("the model cannot run inside unwall.full_params: leave the context first")

    # -- gradients ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Gradients in flight have been reduced."""
        self.executor.finish_reduces(departed=False)
        self.executor.take_reduced()  # whoever asks for this uses them now

    def flush(self) -> None:
        """What ``no_sync`` left on this rank is reduced, too. All ranks call it together."""
        self.forward.forget_interrupted()
        for index, gradient in enumerate(self.gradients):
            if gradient.pending:
                self.executor.reduce(index)
        self.executor.end_step()
        self.settle()

    def finish(self) -> None:
        """Everything in flight has ended, updates too."""
        self.free_discarded()
        self.settle()
        self.groups[0].pending.staging.close()
        for group in self.groups:
            group.pending.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets every gradient of the model. Without ``set_to_none`` they are zeros, and a step counts them."""
        for index in range(len(self.groups)):
            self.refuse_if_used(index)
        for gradient in self.gradients:
            gradient.clear()
        self.loss_scale = 1.0
        self.shown.hide_all()
        self.shown.clear((param for group in self.groups for param in group.params), set_to_none)

    def discard_gradients(self, index: int, slots: set[int]) -> None:
        """Forgets the gradients of some of a group's parameters."""
        gradient = self.gradients[index]
        params = self.groups[index].params
        self.shown.hide(self.places.get(id(params[slot])) for slot in slots)
        with suppress(DiskError):  # it is not wanted any more
            gradient.finish_reduce()
        gradient.present -= slots
        gradient.drop_pending(slots)
        if not gradient.present and not gradient.pending:
            gradient.clear()
            if not any(other.present or other.pending for other in self.gradients):
                self.loss_scale = 1.0
        else:
            gradient.forget(slots)

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Gradients stay on this rank and add up there."""
        before, self.backward.sync = self.backward.sync, self.ranks.size == 1
        try:
            yield
        finally:
            self.backward.sync = before
