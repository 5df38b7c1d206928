"""Lines to the other machines of a model's ranks: how a machine that vanishes is noticed.

[Note: lines]
A process that ends closes its connections, and whoever waits for it learns that at once. A machine that loses its link or its
power closes nothing: a collective with it, and a question to a store that it serves, wait for a quarter of an hour or for ever.
So each process has one idle TCP connection to each other machine, with keep-alive probes. Kernels answer these, whatever their
processes do: a rank that is stopped or computes for long is not taken for one that has vanished. After ``SILENT_S`` seconds
without an answer the kernel ends the connection. Then every ``Watch`` with ranks there is told, and all connections of this
process to that address are shut down, so that whatever waits in one of them raises, as it does where a process has ended.

A line is made to the port at which the first process on a machine listens, at the address it has towards the store. Nothing is
accepted there and nothing is sent. Where no line can be made (a store without an address, a firewall) all is as without lines.
"""

import contextlib
import errno
import ipaddress
import os
import select
import socket
import threading
import weakref
from typing import Any, NamedTuple, Protocol

IDLE_S, PROBE_S, PROBES = 5, 2, 5
SILENT_S = IDLE_S + PROBE_S * PROBES
"""After this time a machine that does not answer has vanished."""
CONNECT_S = 5.0
_TURN_S = 0.5
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class Concerned(Protocol):
    """Has ranks on other machines."""

    def lost(self, machine: str, addresses: set[str]) -> None:
        """One of them has vanished. On the thread of the lines."""


class Line(NamedTuple):
    """The connection to one machine."""

    machine: str
    address: str
    connection: socket.socket


class Lines:
    """All lines of this process. See [Note: lines]."""

    def __init__(self) -> None:
        self._wanted: dict[str, tuple[str, int]] = {}
        self._drawn: dict[int, Line] = {}  # by file descriptor
        self._concerned: dict[str, weakref.WeakSet[Concerned]] = {}
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def machines(self) -> set[str]:
        """To which there are lines now."""
        return {line.machine for line in list(self._drawn.values())}

    def listen(self, local: str) -> int:
        """The port at which this process listens at one of its addresses. Beside a store that it reaches at its loopback (where
        a machine's own name means that) other machines use another address, which it cannot know: it listens at all."""
        with self._lock:
            if self._listener is None:
                family = socket.AF_INET6 if ":" in local else socket.AF_INET
                self._listener = socket.socket(family, socket.SOCK_STREAM)
                self._listener.bind(("" if is_loopback(local) else local, 0))
                self._listener.listen(4096)
            return int(self._listener.getsockname()[1])

    def draw(self, machine: str, address: str, port: int, concerned: Concerned) -> None:
        """A line to a machine, if there is none, and who is told when it breaks."""
        with self._lock:
            if machine not in self._concerned:
                self._concerned[machine] = weakref.WeakSet()
                self._wanted[machine] = (address, port)
            self._concerned[machine].add(concerned)
            if self._thread is None or not self._thread.is_alive():  # a forked child has none
                self._thread = threading.Thread(target=self._run, name="unwall-lines", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        while True:
            with self._lock:
                wanted, self._wanted = self._wanted, {}
            for machine, (address, port) in wanted.items():
                with contextlib.suppress(OSError):
                    line = Line(machine, address, _connect(address, port))
                    self._drawn[line.connection.fileno()] = line
                    poll.register(line.connection, select.POLLIN | select.POLLERR | select.POLLHUP)
            for descriptor, _ in poll.poll(_TURN_S * 1000):
                poll.unregister(descriptor)
                line = self._drawn.pop(descriptor)
                if is_silence(line.connection):
                    self._lost(line)
                line.connection.close()

    def _lost(self, line: Line) -> None:
        """Containers with one address between them count as machines: they vanish together, and so do their lines."""
        there = {line.machine} | {other.machine for other in self._drawn.values() if other.address == line.address}
        for machine in sorted(there):
            with self._lock:
                told = list(self._concerned[machine])
            for concerned in told:
                concerned.lost(machine, {line.address})
        cut_off({line.address})


lines = Lines()


def _connect(address: str, port: int) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=CONNECT_S)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def is_silence(connection: socket.socket) -> bool:
    """Whether a connection was ended because nobody answers. One that was closed or reset was by a living machine."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _SILENCE


def ends_of(store: Any) -> tuple[str, str] | None:
    """This machine's address towards a store, and that of the store. None for one that is not reached over a network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not isinstance(host, str) or not isinstance(port, int):
        return None
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # sends nothing
            return plain(probe.getsockname()[0]), plain(str(there[0]))
    return None


def plain(address: str) -> str:
    """An address as it is compared: IPv4 is IPv4, whatever kind of socket it is used by."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def cut_off(addresses: set[str]) -> int:
    """Shuts down this process's connections to these addresses, whoever made them. Gives how many there were."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                over_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
                if over_tcp and plain(connection.getpeername()[0]) in addresses:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count
