"""Whose a module or a parameter is, by its identity. Keeps neither alive."""

import weakref
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Owners(Generic[Owner]):
    """From things to who owns them. Both may go at any time."""

    def __init__(self) -> None:
        self.version = 0
        """Counts changes: what was found out before one may not hold any more."""
        self._known: dict[int, tuple[weakref.ref[object], weakref.ref[Owner]]] = {}

    def add(self, thing: object, owner: Owner) -> None:
        """The thing is the owner's from now on."""
        key = id(thing)
        self._known[key] = weakref.ref(thing, lambda ref: self._forget(key, ref)), weakref.ref(owner)
        self.version += 1

    def of(self, thing: object) -> Owner | None:
        found = self._known.get(id(thing))
        return found[1]() if found is not None and found[0]() is thing else None

    def _forget(self, key: int, ref: "weakref.ref[object]") -> None:
        """A thing is gone. Another one may have got its id by now."""
        found = self._known.get(key)
        if found is not None and found[0] is ref:
            del self._known[key]
            self.version += 1
