"""Memory that updates ahead of ``step`` use: whose it is at this moment, and when it can be given back."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import get_ident
from typing import Protocol, TypeVar

from unwall.tiers.block import Block


class User(Protocol):
    """What writes into lent memory, and commits it or does not."""

    @property
    def settled(self) -> bool:
        """It will not touch the memory any more."""
        ...

    def stop(self) -> None:
        """Waits until it is settled, and gives up what will not be committed."""
        ...


class _Taken:
    """Stands for a user that is about to be known. The thread that took it lends it before it takes anything else: where that
    thread finds it again, it was interrupted in between, and the memory is idle."""

    def __init__(self) -> None:
        self._thread = get_ident()

    @property
    def settled(self) -> bool:
        return get_ident() == self._thread

    def stop(self) -> None:
        """Nothing is under way yet."""


class Lendable:
    """Blocks that one user has at a time. They are taken from the start: whoever makes them lends them to a user."""

    def __init__(self) -> None:
        self._user: Callable[[], User | None]
        self.take()

    def held(self) -> Iterable[Block]:
        """The blocks."""
        raise NotImplementedError

    def take(self) -> None:
        """From now on it is the caller's, who lends it."""
        taken = _Taken()
        self._user = lambda: taken

    def lend(self, user: User) -> None:
        """From now on it is that user's, until it is settled or gone."""
        self._user = weakref.ref(user)

    @property
    def idle(self) -> bool:
        user = self._user()
        return (user is None or user.settled) and all(block.reader is None for block in self.held())

    def stop_user(self) -> None:
        """Waits for what its user has under way. How that ended is known to those who asked for it."""
        for block in list(self.held()):
            block.await_reader()
        user = self._user()
        if user is not None and not user.settled:
            with suppress(Exception):
                user.stop()


Some = TypeVar("Some", bound=Lendable)


def take_idle(known: Iterable[Some]) -> Some | None:
    """The first one that is not in use, taken."""
    for one in known:
        if one.idle:
            one.take()
            return one
    return None
