"""Everything about one sharded model, in one place: its groups and gradients, what runs them, and what optimizers ask for."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from unwall.native.library import DiskError
from unwall.plans import Plan
from unwall.runtime.audience import Audience
from unwall.runtime.backward import Backward
from unwall.runtime.compute_lane import ComputeLane
from unwall.runtime.counts import Speculated
from unwall.runtime.failures import FailureDomain
from unwall.runtime.forward import Forward
from unwall.runtime.home_stream import HomeStream
from unwall.runtime.leftovers import Free
from unwall.runtime.live import live
from unwall.runtime.meta_buffers import never_loaded
from unwall.runtime.onlooker import Onlooker
from unwall.runtime.places import find_places
from unwall.runtime.replicas import Replicas
from unwall.runtime.shown import Shown
from unwall.runtime.turns import Turn, alone
from unwall.schedule.agreement import Agreement
from unwall.schedule.executor import Executor
from unwall.shards.collectives import Ranks
from unwall.shards.dimensions import Others
from unwall.shards.feign import Feigned
from unwall.shards.gradient import Gradient, Phase
from unwall.shards.group import Group
from unwall.shards.local import copies_of, local
from unwall.tiers.device import DeviceTier
from unwall.tiers.meter import LinkMeter
from unwall.tiers.tiers import Tiers


class Engine:
    """Everything unwall knows about one sharded model."""

    def __init__(
        self,
        plan: Plan,
        groups: list[Group],
        gradients: list[Gradient],
        tiers: Tiers,
        ranks: Ranks,
        others: Others | None = None,
    ) -> None:
        self.plan = plan
        self.groups = groups
        self.gradients = gradients
        self.tiers = tiers
        self.ranks = ranks
        self.others = Others() if others is None else others
        """The ranks of other dimensions of the mesh."""
        self.replicas = None if self.others.replicas is None else Replicas(self.others.replicas, plan, gradients, tiers)
        self._count_copies(groups)
        self.audience = Audience(self)
        self.audience.lend_to(gradients)
        self._names = [group.name for group in groups]
        ranks.meter = LinkMeter("collective", tiers.links.timeline)
        self.lane = ComputeLane(tiers.links)
        names, device = self._names, tiers.device.device
        crossed = bool(self.others.beyond)
        self.executor = Executor(
            groups,
            gradients,
            tiers.device.ledger,
            ranks.size,
            self.lane,
            lambda acts: Agreement(ranks, names, acts, device, Feigned(groups, gradients, ranks, device), crossed),
        )
        self.places = find_places(groups)
        """Where each parameter (by id) lies."""
        self.turn = Turn(ranks.size, lambda: (self.executor.trace.position, self.forward.lookups, self.backward.arrivals.count))
        """Which thread uses the model."""
        self.shown = Shown(self)
        """What ``.grad`` of each parameter shows."""
        self.home_stream = HomeStream(device)
        self.backward = Backward(
            self.executor,
            self.places,
            self.shown,
            tiers.host.ledger,
            self.audience.arriving,
            self.audience.hand_out,
            self.turn,
            plan.passes,
            self.home_stream,
        )
        self.forward = Forward(self.executor, ranks, self.places, self.backward, self._beginning, self.turn)
        self.least_device_bytes = 0
        """What states need on the device in any case."""
        self.least_host_bytes = 0
        """The same on the host."""
        self.activations: Any = None
        """Who decides about activations (runtime/auto.py), if anybody does. Told when a pass with gradients begins."""
        self.version = 0
        """Counts changes of the parameters' values."""
        self.edges: list[Callable[[], None]] = []
        """Called before anything looks at the parameters' values or changes them: see ``edge``."""
        self.checks: list[Callable[[], None]] = []
        """Called before those where the parameters are used, and not only what an optimizer keeps. They may refuse it."""
        self.outside: Any = None
        """Who is asked for parameters that no pass shows (runtime/outside.py). Only kept here."""
        self.staying = {group.buffer.key for group in groups if not group.evictable}
        """The storages of flat buffers that are never dropped."""
        self.lent: set[int] = set()
        """Parameters (by id) that are whole and the user's now, inside ``full_params``."""
        self.loading: set[int] = set()
        """Parameters (by id) that ``load_state_dict`` is writing."""
        self.averaged = False
        """The parameters have the values of an average, inside ``ema.swap``."""
        self.loss_scale = 1.0
        """What the loss of the gradients held now was multiplied with."""
        self.speculation = Speculated()
        self.steps = 0
        """Optimizer steps since the statistics were reset."""
        self.skipped = 0
        """Steps that were skipped because of gradients that were not finite, since the statistics were reset."""
        self.root: weakref.ref[nn.Module] | None = None
        """The model."""
        self.changed = False
        """Modules or parameters were put into the model since it was last looked at."""
        self.look_again: Callable[[Engine], None] | None = None
        """Takes in what was put into the model. See runtime/newcomers.py."""
        self.ignored: dict[int, nn.Parameter] = {}
        """Parameters (by id) that the plan leaves alone."""
        self.unwritten: dict[object, str] = {}
        """The names of parameters (by id) and buffers (by the id of their module and their name in it) that came from the meta
        device, and that nothing was written to yet."""
        self.failures = FailureDomain()
        self._onlooker = self._watched_over()
        live.add(self)
        self.discarded: deque[Free] = deque()
        """How to free what optimizers that are gone have left here. See runtime/leftovers.py."""

    def _watched_over(self) -> Onlooker | None:
        """The other ranks are told of passes that end unseen."""
        agreement = self.executor.agreement
        if self.ranks.size == 1 or not isinstance(agreement, Agreement):
            return None
        onlooker = Onlooker(self.forward, self.backward, agreement, self.device.device)
        self.ranks.control.watch.onlookers.add(onlooker)
        return onlooker

    @property
    def device(self) -> DeviceTier:
        return self.tiers.device

    @property
    def everyone(self) -> Ranks:
        """All ranks of the mesh."""
        return self.ranks if self.others.everyone is None else self.others.everyone

    @property
    def is_first(self) -> bool:
        """Whether this rank gets what is whole."""
        return self.ranks.rank == 0 and self.others.is_first

    def together(self, what: str) -> None:
        """Something that all ranks must call at once: ``what`` it is. DivergedError, not a hang, when one of them does not."""
        self.executor.together(what)

    def free_discarded(self) -> None:
        """Frees what optimizers that are gone have left here. Called where waiting and locking is allowed."""
        for _ in range(len(self.discarded)):  # what cannot be freed yet adds itself again
            self.discarded.popleft()(self)

    def _beginning(self) -> None:
        """A pass begins."""
        self.audience.close_updates()  # of a backward that failed
        self.edge()
        self.free_discarded()
        if self.lent:
            raise RuntimeError("the model cannot run inside unwall.full_params: leave the context first")
        if self.changed and self.look_again is not None:
            self.look_again(self)
        if self.unwritten:
            raise RuntimeError(never_loaded(list(self.unwritten.values())))
        if self.activations is not None and torch.is_grad_enabled():
            self.activations.begin_pass()

    def is_reshaped(self, param: nn.Parameter) -> bool:
        """Whether a parameter was given data of another shape than it has in its group."""
        place = self.places[id(param)][0]
        return local(param).shape != self.groups[place.group].layout.slots[place.slot].shape

    def set_aside(self, param: nn.Parameter) -> None:
        """A parameter of another shape leaves its group, where something nobody uses takes its place. The next look at the
        model takes it in anew, with the values it has now."""
        for place in self.places.pop(id(param)):
            group = self.groups[place.group]
            group.params[place.slot] = nn.Parameter(torch.empty(0, dtype=group.layout.dtype), param.requires_grad)
            group.show(place.slot)
        self.backward.arrivals.grown()  # nothing that was noted of the group's parameters holds
        self.changed = True

    def add(self, groups: list[Group], gradients: list[Gradient]) -> None:
        """Groups for parameters that came after ``shard``. All ranks do it at the same point."""
        self.groups += groups
        self.gradients += gradients
        self._names += [group.name for group in groups]
        self._count_copies(groups)
        self.audience.lend_to(gradients)
        self.places.update(find_places(groups))
        self.executor.grown()
        self.backward.grown()
        self.forward.saved.follow(groups)
        self.staying.update(group.buffer.key for group in groups if not group.evictable)

    def _count_copies(self, groups: list[Group]) -> None:
        for group in groups:
            group.copies = copies_of(group.params[0], self.others.tensor_size)

    def edge(self) -> None:
        """Everything that was written to parameters outside a pass is in the master. For whoever reads or writes masters."""
        for check in self.checks:
            check()
        self._settle_writes()
        self.audience.update_rest()

    def _settle_writes(self) -> None:
        for settle in self.edges:
            settle()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Gradients in flight have been reduced."""
        self.executor.finish_reduces(departed=False)
        self.executor.take_reduced()  # whoever asks for this uses them now

    def flush(self) -> None:
        """What ``no_sync`` left on this rank is reduced, too. All ranks call it together."""
        self.edge()
        self.forward.forget_interrupted()
        self.backward.forget_interrupted()
        for index, gradient in enumerate(self.gradients):
            if gradient.pending:
                self.executor.reduce(index)
        self.executor.end_step(meet=self._check_landed())
        self.settle()
        if self.replicas is not None:
            self.replicas.average(self)

    def _check_landed(self) -> bool:
        """Gradients on their way to a disk may not arrive on some rank. Then the step fails on all of them, before anything is
        updated. True where there are such gradients."""
        if self.ranks.size == 1 or all(group.home.grads != "disk" for group in self.groups):
            return False
        try:
            self.settle()
            for gradient in self.gradients:
                gradient.check()
        except BaseException as error:
            self.executor.agreement.fail(error, spoilt=True)
            raise
        return True

    @alone
    def finish(self) -> None:
        """Everything in flight has ended, updates too."""
        self._settle_writes()
        self.free_discarded()
        self.settle()
        self.groups[0].pending.staging.close()
        for group in self.groups:
            group.pending.settle()

    @alone
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets every gradient of the model. Without ``set_to_none`` they are zeros, and a step counts them."""
        for index in range(len(self.groups)):
            self.audience.refuse_if_used(index)
        self.shown.note_cleared()
        for gradient in self.gradients:
            gradient.clear()
        self.loss_scale = 1.0
        self.shown.hide_all()
        self.shown.clear((param for group in self.groups for param in group.params), set_to_none)

    def discard_gradients(self, index: int, slots: set[int]) -> None:
        """Forgets the gradients of some of a group's parameters."""
        gradient = self.gradients[index]
        params = self.groups[index].params
        self.shown.hide([self.places.get(id(params[slot])) for slot in slots])
        if gradient.phase is not Phase.IDLE:
            with suppress(DiskError):  # it is not wanted any more
                gradient.finish_reduce()
        gradient.present -= slots
        gradient.elsewhere -= slots
        if gradient.pending:
            gradient.drop_pending(slots)
        if not gradient.present and not gradient.pending and not gradient.elsewhere:
            gradient.clear()
            if self.loss_scale != 1.0 and not any(other.present or other.pending for other in self.gradients):
                self.loss_scale = 1.0
        else:
            gradient.forget(slots)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Several forwards and backwards, in an order that repeats, are one pass: a step of a pipeline's schedule. ``.grad``
        shows nothing before its end."""
        self.shown.hide_for_a_while()
        self.forward.long = 0
        try:
            yield
        finally:
            self.forward.long = None
        self.shown.show()

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Gradients stay on this rank and add up there."""
        before, self.backward.arrivals.sync = self.backward.arrivals.sync, self.ranks.size == 1
        try:
            yield
        finally:
            self.backward.arrivals.sync = before
