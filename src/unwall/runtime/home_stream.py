"""The CUDA stream that a pass is at home on, and what happens on others.

[Note: home stream]
On an accelerator the order in which memory is written, read and given to someone else is that of a stream. Home is the one on
which the pass's outermost call is made: there groups are fetched and dropped, and gradients copied and reduced. A model may
compute parts of itself on other streams, and autograd runs the backward of each part where its forward ran. Whoever comes to
the engine from there *visits* home: home waits for all that those streams have queued, what the engine queues is queued at
home, and the stream goes on after it. A model that stays at home pays one look for it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from unwall.shards.local import local


class HomeStream:
    """See [Note: home stream]. Without an accelerator everybody is at home."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.look: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if self._cuda else int
        """Given ``index``: the stream of now, as a number. Home's is ``number``."""
        self.index = (torch.cuda.current_device() if device.index is None else device.index) if self._cuda else 0
        self.number = 0
        self._home: torch.cuda.Stream | None = None
        self._others: dict[int, torch.cuda.Stream] = {}
        """Those that have visited in this pass."""

    @property
    def elsewhere(self) -> bool:
        """Whether whoever comes now has to visit: from another stream, or after someone from there."""
        return bool(self._others) or self.look(self.index) != self.number

    def settle(self) -> None:
        """A pass begins: home is where it begins. What it may write to has been read by passes that were at home elsewhere."""
        if not self._cuda or (self._home is not None and not self.elsewhere):
            return
        here = torch.cuda.current_stream(self._device)
        before = [*self._others.values(), *([] if self._home is None else [self._home])]
        self._others.clear()
        self._home, self.number = here, here.cuda_stream
        if torch.cuda.is_current_stream_capturing():  # whoever captures a graph has waited for what was before
            return
        for stream in before:
            here.wait_stream(stream)

    @contextmanager
    def visited(self, *brought: torch.Tensor) -> Iterator[None]:
        """Inside, what is queued is queued at home. ``brought``: tensors of the stream of now that are read there."""
        if self._home is None:
            self.settle()
        here, home = torch.cuda.current_stream(self._device), self._home
        assert home is not None
        if here != home:
            self._others[here.cuda_stream] = here
        for other in self._others.values():
            home.wait_stream(other)
        if here == home:
            yield
            return
        for tensor in brought:
            for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (local(tensor),):
                part.record_stream(home)
        try:
            with torch.cuda.stream(home):
                yield
        finally:
            here.wait_stream(home)


class HasHome(Protocol):
    """Who follows a model's passes."""

    home_stream: HomeStream


H = TypeVar("H", bound=HasHome)
P = ParamSpec("P")
R = TypeVar("R")


def at_home(method: "Callable[Concatenate[H, P], R]") -> "Callable[Concatenate[H, P], R]":
    """A method that works at home, from wherever it is called."""

    @functools.wraps(method)
    def visiting(self: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.home_stream.elsewhere:
            with self.home_stream.visited():
                return method(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return visiting
