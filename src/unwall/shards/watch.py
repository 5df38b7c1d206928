"""What the ranks of a model tell each other in the store, apart from every collective: faults, ends, signs of life.

[Note: watch]
A rank that waits for another one hears nothing from it. So each process has a thread that looks into the store of the process
group twice a second. A rank that fails writes that down there ("fault": the ranks will meet and can go on; "end": they cannot),
and whoever waits, or is about to begin a collective, finds it in a field of its ``Watch``. A rank that waits for long asks: the
threads of all ranks answer with the place where their rank is. Nothing is written while all is well, and nobody but that thread
reads the store unless something has failed. The thread also asks whether this rank's own pass has ended where nobody saw it
(``Onlooker``): then it tells the others in its place.

A store that fails, whatever it raises, has nothing to say: it went with the process that serves it, and whoever waits for that
rank finds out without a store. The thread goes on whatever happens in a look, or nobody would be told of anything any more.

Whether a rank that does not answer is slow, stopped or dead is seen in its process, where it runs on this machine. Of a rank
elsewhere it is known whether its thread still answers, and whether its machine does ([Note: lines] in shards/lines.py).
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from unwall.shards import looking
from unwall.shards.lines import ends_of, is_loopback, lines
from unwall.shards.looking import LOOK_S
from unwall.shards.processes import Process, look_up, machine_name
from unwall.shards.stuck import Stuck
from unwall.shards.uncaught import tell_uncaught

ANSWER_S = 3 * LOOK_S
"""After this time a rank whose process runs has answered."""
WAITS_S = 2.0
"""A rank that has been waiting for others for so long will not do anything else before they come."""
CERTAIN = 4
"""After so many looks a rank that has ended is given up where only the device waits for it: all may be ending just now."""
MOST_TEXT = 2000
"""Characters of an error that the other ranks are told."""


class Onlooker(Protocol):
    """Sees from outside how a model is used on this rank."""

    def look(self) -> None:
        """Called on the thread that looks, about twice a second."""


class Watch:
    """One rank's side of it, for one set of ranks. See [Note: watch]."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.end = ""
        """Why the ranks cannot go on, once one of them knows."""
        self.faults = 0
        """Faults after which the ranks have met again, counted alike on every rank."""
        self.place: weakref.WeakMethod[Callable[[], str]] | None = None
        """Says where this rank is, for the others."""
        self.stuck = Stuck()
        """What the device waits in is given up when the ranks cannot go on, on the thread that looks."""
        self.onlookers: weakref.WeakSet[Onlooker] = weakref.WeakSet()
        """Asked whenever the thread looks."""
        self.lock = threading.RLock()
        """Held by whoever agrees on something with the other ranks, so that the thread that looks does not come between."""
        self.parting: weakref.WeakMethod[Callable[[], None]] | None = None
        """Ends the exchange in which the others learn of this rank's fault, while that is under way."""
        self.failed = False
        """A look has failed, and that was said."""
        self.thread = threading.get_ident()
        """The one that used the model last."""
        self.dimension = ""
        """Of a mesh, whose ranks these are: for messages."""
        self.names: list[str] = []
        """What each rank is called there, if not by its number."""
        self.waits_since: float | None = None
        """When this rank began the wait that it is in, once that lasts. See [Note: long waits] in shards/long_wait.py."""
        self.slow_told = False
        """It was said once that the ranks wait for long."""
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._heard = (-1, "")  # the number of a fault and its text
        self._asked = ""
        self._dead_for = 0  # looks in a row
        self._processes: dict[int, Process] = {}
        self._vanished: set[int] = set()
        self._lines_drawn = False
        self._has_left = False
        self._ends: tuple[str, str] | None = None  # this machine's address and the store's, once they are needed
        self._set(f"who/{rank}", " ".join(map(str, (machine_name(), os.getpid(), look_up(os.getpid())[1]))))
        looking.begin(self)
        tell_uncaught(self)

    def let_go(self) -> None:
        """Keeps the store no longer."""
        self._store = None

    # -- faults -------------------------------------------------------------------------------------------------------

    @property
    def fault(self) -> str:
        """What another rank has failed with, if the ranks have not met since."""
        number, text = self._heard
        return text if number == self.faults else ""

    def tell_fault(self, text: str) -> None:
        """This rank has failed, and will meet the others."""
        self._set(f"fault/{self.faults}/{self._rank}", text)
        self._set(f"fault/{self.faults}", f"rank {self._rank} failed: {text}")

    def faults_of(self, ranks: list[int]) -> str:
        """What these ranks have failed with, as each of them told."""
        told = {rank: self._get(f"fault/{self.faults}/{rank}") for rank in ranks}
        return "; ".join(f"rank {rank} failed: {text or '(it did not say why)'}" for rank, text in told.items())

    def tell_end(self, text: str) -> None:
        """The ranks cannot go on."""
        if not self.end:
            self._end(text)
            looking.wake.set()  # the thread gives up what the device is stuck in, before torch's own watchdog ends the process
        if not self._get("end"):
            self._set("end", text)

    def _end(self, text: str) -> None:
        """From now on whoever waits raises."""
        self.stuck.hold()
        self.end = self.end or text

    def tell_ended(self, what: str) -> None:
        """An exception has ended this rank's script: see shards/uncaught.py."""
        if self.end:  # the others know, and the store may be gone
            return
        name = self.names[self._rank] if self.names else f"rank {self._rank}"
        self.tell_end(f"{name} has ended with {what}. It was {self.where()}. Start all ranks again, from a checkpoint")

    def come_alike(self, what: str, seconds: float) -> bool:
        """Whether all other ranks say the same within this time: only after something has gone wrong. One that has been waiting
        for other ranks all the while does not: it waits for this one. Whoever decides first decides for all."""
        self._set(f"{what}/{self._rank}", "here")
        missing, until, asked = list(self._others), time.monotonic() + seconds, ""
        ask_at = time.monotonic() + LOOK_S  # a wait that has just come to its end is over by then
        while not (verdict := self._get(f"{what}/verdict")):
            missing, now = [rank for rank in missing if not self._get(f"{what}/{rank}")], time.monotonic()
            in_vain = self.end or self.fault or any(self._waits(rank, asked) for rank in missing if asked)
            if not missing or in_vain or now >= until:
                verdict = self._decide(f"{what}/verdict", "apart" if missing else "alike")
                break
            if now >= ask_at:
                asked, ask_at = self._ask(), now + 2 * LOOK_S
            time.sleep(LOOK_S / 25)
        return verdict == "alike"

    def _waits(self, rank: int, asked: str) -> bool:
        """Whether a rank has answered that it has long been waiting for others."""
        answered, _, waited_s = self._sign(rank)
        return answered == asked and float(waited_s or 0) >= WAITS_S

    # -- signs of life ------------------------------------------------------------------------------------------------

    def describe_others(self) -> str:
        """What is known of each other rank, for an error."""
        asked, until = self._ask(), time.monotonic() + ANSWER_S
        while time.monotonic() < until and any(self._may_answer(rank, asked) for rank in self._others):
            time.sleep(LOOK_S / 5)
        return "; ".join(self._describe(rank) for rank in self._others)

    def _ask(self) -> str:
        """All ranks say where they are. What they answer to."""
        asked = f"{self._rank} {time.time()}"
        self._set("ask", asked)
        return asked

    def left(self) -> str:
        """A rank whose script has come to its end although its process has not, if there is one. One of several."""
        rank = self._get("left")
        return self._name(int(rank)) if rank and int(rank) != self._rank else ""

    def stopped(self) -> str:
        """Ranks of this machine whose process is stopped, if there are any."""
        return "; ".join(self._describe(rank) for rank in self._others if self._state(rank) == "stopped")

    def dead(self) -> list[int]:
        """Ranks whose process has ended, on this machine, or whose machine has vanished."""
        return [rank for rank in self._others if self._state(rank) in ("gone", "vanished")]

    def lost(self, machine: str, addresses: set[str]) -> None:
        """A machine has vanished. On the thread of the lines, which asks no store: it may have served this one."""
        self._vanished |= {rank for rank, process in self._processes.items() if process.machine == machine}
        if self._ends is not None and self._ends[1] in addresses:
            self.let_go()
        told = " and ".join(self._describe(rank) for rank in sorted(self._vanished))
        self._end(f"{told}. Start all ranks again, from a checkpoint")
        looking.wake.set()

    def _may_answer(self, rank: int, asked: str) -> bool:
        return self._state(rank) not in ("gone", "stopped", "vanished") and self._sign(rank)[0] != asked

    def _describe(self, rank: int) -> str:
        process, state, name = self._process(rank), self._state(rank), self._name(rank)
        if state == "gone":
            return f"{name} has ended (process {process.pid})"
        if state == "vanished":
            return f"{name} has vanished: its machine ({process.machine.partition('/')[0]}) does not answer any more"
        if state == "stopped":
            return f"rank {rank} is stopped (process {process.pid}; SIGCONT lets it go on)"
        if self._get("left") == str(rank):
            return f"{name} has come to the end of its script (process {process.pid} is still there)"
        place = self._sign(rank)[1]  # asks the store: not for a rank that has vanished, see lost()
        if place:
            return f"rank {rank} runs (process {process.pid}): it is {place}"
        if state == "runs":
            return f"rank {rank} runs (process {process.pid}), but does not answer"
        return f"rank {rank} (process {process.pid} on another machine) does not answer: it is stopped, dead or cut off"

    def _name(self, rank: int) -> str:
        return self.names[rank] if self.names else f"rank {rank}{f' of {self.dimension}' if self.dimension else ''}"

    def _sign(self, rank: int) -> tuple[str, str, str]:
        """What the last sign of life answers, the place it tells, and for how many seconds the rank has been waiting there."""
        asked, _, rest = self._get(f"sign/{rank}").partition("\n")
        waited_s, _, place = rest.partition("\n")
        return asked, place, waited_s

    def _state(self, rank: int) -> str:
        process = self._process(rank)
        if process.machine != machine_name():
            return "vanished" if rank in self._vanished else "elsewhere"
        state, began = look_up(process.pid)
        if began != process.began or state in ("Z", "X"):
            return "gone"
        return "stopped" if state in ("T", "t") else "runs"

    def _process(self, rank: int) -> Process:
        if rank not in self._processes:
            self._know(rank, self._get(f"who/{rank}"))
        return self._processes.get(rank, Process("unknown", 0, ""))

    def _know(self, rank: int, who: str) -> None:
        machine, _, rest = who.partition(" ")
        pid, _, began = rest.partition(" ")
        if pid:
            self._processes[rank] = Process(machine, int(pid), began)

    def _all_are_there(self) -> bool:
        """Asked at once: where there are a thousand ranks, a thousand ask the same store for a thousand others."""
        missing = [rank for rank in self._others if rank not in self._processes]
        keys, store = [f"who/{rank}" for rank in missing], self._store
        with contextlib.suppress(Exception):  # a store that cannot: one by one
            if not missing or store is None or not store.check(keys):
                return not missing
            for rank, who in zip(missing, store.multi_get(keys), strict=True):
                self._know(rank, who.decode(errors="replace"))
        return True

    def _draw_lines(self) -> None:
        """Lines to the other machines, as soon as it is known which there are. See [Note: lines] in shards/lines.py."""
        if not self._all_are_there():
            return
        first: dict[str, int] = {}
        for rank in self._others:
            first.setdefault(self._process(rank).machine, rank)
        if "unknown" in first:
            return
        first.pop(machine_name(), None)
        self._lines_drawn = True
        if first and self._ends is None:
            self._ends = ends_of(self._store)
        if not first or self._ends is None:
            return
        local, serves = self._ends
        self._set(f"line/{self._rank}", f"{'' if is_loopback(local) else local} {lines.listen(local)}")
        told = {machine: self._get(f"line/{rank}") for machine, rank in first.items()}
        self._lines_drawn = all(told.values())
        for machine, text in told.items():
            address, _, port = text.partition(" ")
            if port:
                lines.draw(machine, address or serves, int(port), self)

    # -- the store ----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """What is new there. On the thread that looks."""
        number = self.faults
        fault = self._get(f"fault/{number}")
        if fault:
            self._heard = (number, fault)
        if end := self._get("end"):
            self._end(end)  # meanwhile another thread may have found one: it stays
        asked = self._get("ask")
        if asked != self._asked:
            self._asked = asked
            since = self.waits_since
            waited_s = 0.0 if since is None else time.monotonic() - since
            self._set(f"sign/{self._rank}", f"{asked}\n{waited_s:.1f}\n{self.where()}")
        for onlooker in list(self.onlookers):
            onlooker.look()
        if not self._lines_drawn:
            self._draw_lines()
        if looking.script_has_ended(self.thread) != self._has_left:
            self._has_left = not self._has_left
            if self._has_left or self._get("left") == str(self._rank):  # another thread, or an exit handler, may use the model
                self._set("left", str(self._rank) if self._has_left else "")
        self._dead_for = self._dead_for + 1 if self.stuck and self.dead() else 0
        if self._dead_for >= CERTAIN:
            self._end(f"rank {', '.join(map(str, self.dead()))} has ended")
        if self.end and self.stuck:
            self.stuck.give_up(f"unwall: rank {self._rank} gives its collectives up: {self.end}")

    def where(self) -> str:
        """The place of this rank."""
        place = self.place() if self.place is not None else None
        return place() if place is not None else "outside of the model"

    def _get(self, key: str) -> str:
        """Empty where there is nothing, or the store fails: [Note: watch]."""
        store = self._store
        with contextlib.suppress(Exception):
            if store is not None and store.check([key]):
                return str(store.get(key).decode(errors="replace"))
        return ""

    def _decide(self, key: str, text: str) -> str:
        """Says it where no other rank has said something else before. What holds."""
        store = self._store
        with contextlib.suppress(Exception):
            if store is not None:
                return str(store.compare_set(key, "", text).decode(errors="replace"))
        return text

    def _set(self, key: str, text: str) -> None:
        store = self._store
        with contextlib.suppress(Exception):
            if store is not None:
                store.set(key, text[:MOST_TEXT])
