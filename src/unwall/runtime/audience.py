"""The optimizers of one sharded model: what they are told of its gradients, and what they update ahead of the step."""

import weakref
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

from unwall.shards.gradient import Gradient

if TYPE_CHECKING:
    from unwall.runtime.engine import Engine

Told = list[weakref.WeakMethod[Callable[["Engine", int], None]]]
"""Methods of optimizers, for as long as those live."""


class Audience:
    """Optimizers come and go; each is told what it asked for."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.listeners: Told = []
        """Told of each gradient that is reduced and on its way to its place, during backward."""
        self.guards: Told = []
        """Told of each gradient that arrives, or is changed by hand. They may refuse it."""
        self.lookers: Told = []
        """Told before someone looks at gradients or changes them: they do what they had put off until the step."""
        self.movers: Told = []
        """Told before states move to other tiers: what was computed ahead of a step, and the memory for it, goes."""
        self._updated: set[int] = set()
        """Groups that were updated in this backward, ahead of the step."""
        self._some_updated = False
        """Some groups were updated ahead of the step, and the gradients of others may still be on their way."""

    def listen(self, reduced: "Callable[[Engine, int], None]", guard: "Callable[[Engine, int], None] | None") -> None:
        """Tells an optimizer of gradients for as long as it lives."""
        for methods, method in ((self.listeners, reduced), (self.guards, guard)):
            methods[:] = [known for known in methods if known() is not None]
            if method is not None:
                methods.append(weakref.WeakMethod(method))

    def looked_at(self) -> None:
        """Someone is about to look at gradients, or to change them."""
        self._tell(self.lookers, 0)

    def about_to_move(self) -> None:
        """The states are about to move to other tiers."""
        self._tell(self.movers, 0)

    def refuse_if_used(self, index: int) -> None:
        """A group's gradient is about to be changed. Raises where an update has used it already."""
        if self.guards:
            self._tell(self.guards, index)

    def arriving(self, index: int) -> None:
        """A gradient of a group arrives. Refused here where all that there can be were used, before anything is changed for it;
        of other groups each gradient sees to that itself: reentrant checkpoints bring them one after the other."""
        if self._engine.gradients[index].all_used:
            self.refuse_if_used(index)

    def _tell(self, methods: Told, index: int) -> None:
        for method in methods:
            call = method()
            if call is not None:
                call(self._engine, index)

    def hand_out(self) -> None:
        """Tells the optimizers which gradients are reduced. Here, and nowhere else in a pass, they may wait for an update."""
        engine = self._engine
        if engine.executor.reduced and engine.replicas is None:
            for index in engine.executor.take_reduced():
                self._tell(self.listeners, index)
                if engine.plan.transient:
                    engine.gradients[index].let_go()
        if not engine.backward.running:
            self.close_updates()
            if engine.forward.long is None:
                engine.shown.show()

    # -- updates ahead of the step ------------------------------------------------------------------------------------

    def updated_early(self, index: int, slots: Set[int]) -> None:
        """An update writes parameters ahead of the step. Whoever reads them in this backward is told."""
        group = self._engine.groups[index]
        group.faces.updated(slots, here=group.home.tier == "device")
        self._updated.add(index)
        self._some_updated = True

    def close_updates(self) -> None:
        """No backward runs in which such parameters could be read."""
        while self._updated:
            self._engine.groups[self._updated.pop()].faces.backward_ended()

    def update_rest(self) -> None:
        """Whoever looks between backward and step sees all groups as they are after the step, if some were updated ahead of it:
        the last gradients are waited for, and handed out."""
        if self._some_updated and not self._engine.backward.running:
            self._some_updated = False
            self._engine.executor.finish_reduces(departed=False)
            self.hand_out()

    # -- gradients that are not kept ----------------------------------------------------------------------------------

    def lend_to(self, gradients: list[Gradient]) -> None:
        """They may ask for what lies in the memory that they share."""
        for gradient in gradients:
            if gradient.loans is not None:
                gradient.loans.short = weakref.WeakMethod(self._use_now)

    def _use_now(self) -> None:
        """Host memory for gradients that are not kept is short: those that are there are used, if only some of their group's
        have come. It may wait for updates, as ``hand_out``, and updates wait for nobody who makes room."""
        for index, gradient in enumerate(self._engine.gradients):
            if gradient.lends:
                self._tell(self.listeners, index)
                gradient.let_go()
