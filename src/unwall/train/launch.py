"""``--nproc N``: this command, once per process, on this machine."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from unwall.terminal import say
from unwall.train.errors import TrainError

GRACE_S, END_S = 3.0, 30.0
"""What processes get to end by themselves once one of them has failed, until they are asked to, and until they are ended."""
_POLL_S = 0.05
_PDEATHSIG = 1
STARTED = "UNWALL_TRAIN_STARTED"
"""Set in the processes that were started here."""
LISTENER = "UNWALL_TRAIN_LISTENER"
"""Set in rank 0: its end of the socket at which the ranks meet. A port that is only known to be free is anyone's until rank 0
listens there, seconds later: here it is taken from the start."""


def under_launcher() -> bool:
    """Whether torchrun, or this file, started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def check_launcher(nproc: int | None) -> None:
    """TrainError where two launchers would start processes."""
    if nproc is not None and under_launcher() and STARTED not in os.environ:
        raise TrainError("--nproc under torchrun: torchrun has started the processes already; leave --nproc out")


def launch(nproc: int, arguments: list[str]) -> int:
    """Starts the processes and waits for them. The exit status: that of the first one that failed."""
    with socket.create_server(("127.0.0.1", 0), backlog=nproc) as listener:
        children = [_start(rank, nproc, listener, arguments) for rank in range(nproc)]

    def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (of signal's signature)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    # A terminal sends Ctrl-C to all of them, someone else to this one alone: see AT_ONCE_S in signals.py.
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _start(rank: int, nproc: int, listener: socket.socket, arguments: list[str]) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), STARTED: "1",
    }  # fmt: skip
    handed = (listener.fileno(),) if rank == 0 else ()
    if handed:
        environment[LISTENER] = str(handed[0])
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # where a rank is gone torch prints pages of its own frames
    parent = os.getpid()

    def follow_parent() -> None:
        """Whoever ends the command, however, ends its processes."""
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    command = [sys.executable, "-m", "unwall", *arguments]
    return subprocess.Popen(command, env=environment, preexec_fn=follow_parent, pass_fds=handed)


def _wait(children: "list[subprocess.Popen[bytes]]") -> int:
    status, failed = 0, float("inf")
    asked: set[int] = set()
    while True:
        codes = [child.poll() for child in children]
        bad = next((code for code in codes if code), None)
        if bad is not None and not status:
            _say_killed(codes.index(bad), -bad)
            status = bad if bad > 0 else 128 - bad
            failed = time.monotonic()
        if all(code is not None for code in codes):
            return status
        for after, number in ((GRACE_S, signal.SIGTERM), (END_S, signal.SIGKILL)):
            if time.monotonic() > failed + after and number not in asked:
                asked.add(number)
                for child in children:
                    if child.poll() is None:
                        child.send_signal(number)
        time.sleep(_POLL_S)


def _say_killed(rank: int, number: int) -> None:
    """Of a process that was ended from outside, or crashed, nobody else would say so."""
    if number <= 0 or number in (signal.SIGTERM, signal.SIGINT):
        return
    why = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    name = signal.Signals(number).name
    say(f"unwall: rank {rank} was ended by {name}{why}; the same command goes on from what was saved last", error=True)


def spread(arguments: list[str], options: tuple[str, ...]) -> list[str]:
    """``--data a b`` as ``--data a --data b``: a shell makes the former of ``--data *.jsonl``."""
    found: list[str] = []
    current: str | None = None
    for number, argument in enumerate(arguments):
        if argument.startswith("-"):
            current = argument if argument in options else None
            found.append(argument)
        elif current is not None and arguments[number - 1] != current:
            found += [current, argument]
        else:
            found.append(argument)
    return found
