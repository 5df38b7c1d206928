"""Updates on the host, off the caller's thread, in the order they are asked for.

[Note: order]
One thread takes updates first in, first out: it waits until a gradient has landed, hands the spans to the native workers and
waits for them. ``step`` asks in the order of the model, which is the order in which the next forward needs the groups, and
returns at once; a fetch waits for its own group's update only. The results are those of a synchronous step.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from unwall.native.pool import AdamWStep
from unwall.optim.kernels import Span, adamw
from unwall.tiers.ticket import FutureTicket, Ticket

_threads: dict[int, ThreadPoolExecutor] = {}  # by process: a forked child needs its own


class Factor:
    """What gradients are multiplied with. Read on the updating thread: it may still be on its way from the device."""

    def __init__(self, inverse: float, clip: torch.Tensor | None) -> None:
        self._inverse = inverse
        self._clip = clip

    def get(self) -> float:
        if self._clip is not None:
            self._inverse *= float(self._clip)
            self._clip = None
        return self._inverse


def update_on_host(spans: Sequence[tuple[Span, AdamWStep]], landing: Ticket | None, factor: Factor) -> Ticket:
    """Queues one group's update. The ticket ends when parameters, master and moments are written."""

    def work() -> None:
        if landing is not None:
            landing.wait()
        scale = factor.get()
        tickets = [adamw(span, _scaled(step, scale)) for span, step in spans]
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()

    return FutureTicket(_thread().submit(work))


def _scaled(step: AdamWStep, scale: float) -> AdamWStep:
    return AdamWStep(
        lr=step.lr, beta1=step.beta1, beta2=step.beta2, eps=step.eps, weight_decay=step.weight_decay,
        grad_scale=step.grad_scale * scale, step=step.step,
    )  # fmt: skip


def _thread() -> ThreadPoolExecutor:
    pid = os.getpid()
    if pid not in _threads:
        _threads[pid] = ThreadPoolExecutor(1, thread_name_prefix="unwall update")
    return _threads[pid]
