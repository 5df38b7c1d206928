"""Rank processes for tests: started once per test file, reused by every test in it.

``pool.run(fn, ...)`` calls a top-level function in every rank, with ``torch.distributed`` (gloo) initialised, and gives the
list of what the ranks returned. A world of one rank is this process, without ``torch.distributed``; ``alone(fn, ...)`` calls a
function in a new process instead, for tests that count what a process holds.
"""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START_LIMIT_S = 300.0
RUN_LIMIT_S = 400.0
"""Far beyond what anything here needs, also on a slow machine that does other things: they only end what hangs."""
AFTER_FAILURE_S = 5.0
"""How long the other ranks get to report once one has failed: they may be waiting for it in a collective."""


_ENVIRONMENT = dict(os.environ)
"""As it is before any test has changed it."""


class RankError(AssertionError):
    """A rank raised, died or did not finish in time."""


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def fork_context() -> Any:
    """How processes start: one server imports what takes long, once, and forks each of them from there, before any thread
    exists. Nothing of unwall is imported in the server."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.testing", "pytest", "transformers.modeling_utils"])
    now = dict(os.environ)
    try:
        _set_environment(_ENVIRONMENT)  # every later process has that of the server, not that of the test which starts it
        forkserver.ensure_running()
    finally:
        _set_environment(now)
    return context


def _set_environment(values: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


def forget_what_others_kept() -> None:
    """Whether garbage is looked for depends on whether it was found before, in the whole process: see shards/flat.py."""
    flat = sys.modules.get("unwall.shards.flat")
    if flat is not None:
        flat.FlatBuffer.in_vain = 0


class RankPool:
    """A fixed number of rank processes. After a failure they are replaced: their collectives may be out of step."""

    def __init__(self, world_size: int, backend: str | None = "gloo") -> None:
        """``backend`` None: one process, without ``torch.distributed``."""
        self.world_size = world_size
        self._backend = backend
        self._processes: list[mp.Process] = []
        self._pipes: list[connection.Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, fn: Callable[..., Any], *args: Any, limit_s: float = RUN_LIMIT_S, **kwargs: Any) -> list[Any]:
        """Calls ``fn(*args, **kwargs)`` in every rank; the results in rank order."""
        if self.world_size == 1 and self._backend is not None:
            return [fn(*args, **kwargs)]
        try:
            if not self._processes:
                self._start()
            message = pickle.dumps((fn, args, kwargs))
            for pipe in self._pipes:
                pipe.send_bytes(message)
            return self._collect(getattr(fn, "__name__", str(fn)), limit_s)
        except BaseException:  # whoever was waiting gave up (a time-out): the next test must not get this one's answers
            self._end()
            raise

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def _start(self) -> None:
        context = fork_context()
        self._folder = tempfile.TemporaryDirectory(prefix="unwall-ranks-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, self._folder.name, theirs, self._backend)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()  # so that a rank that dies closes the pipe
            self._processes.append(process)
            self._pipes.append(ours)
        self._collect("start", START_LIMIT_S)

    def _collect(self, what: str, limit_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + limit_s
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    worked, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=5)
                    worked, value = False, f"the process died with exit code {self._processes[rank].exitcode}"
                (results if worked else failures)[rank] = value
                if not worked:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        if not waiting and not failures:
            return [results[rank] for rank in range(self.world_size)]
        for rank in waiting.values():
            failures[rank] = (
                f"did not finish (limit {limit_s:.0f} s, {AFTER_FAILURE_S:.0f} s after a failure):\n{self._stack(rank)}"
            )
        raise RankError(f"{what} failed:\n" + "\n".join(f"[rank {rank}] {failures[rank]}" for rank in sorted(failures)))

    def _stack(self, rank: int) -> str:
        """Where a rank that does not answer is."""
        path = _stack_path(self._folder.name, rank)
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            text = path.read_text()
            if text.endswith("\n") and 'File "' in text:
                return text
            self._processes[rank].join(timeout=0.05)
        return "(no stack)"


def alone(fn: Callable[..., Any], *args: Any, limit_s: float = RUN_LIMIT_S) -> Any:
    """What ``fn(*args)`` gives in a process of its own: nothing that other tests have left in this one counts there."""
    pool = RankPool(1, backend=None)
    try:
        return pool.run(fn, *args, limit_s=limit_s)[0]
    finally:
        pool.close()


def _stack_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}"


def _share_one_gpu(rank: int) -> None:
    """NCCL refuses two ranks on one GPU only where host and bus are the same: each rank says that it is a host of its own."""
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(0)


def _serve(rank: int, world_size: int, folder: str, pipe: connection.Connection, backend: str | None) -> None:
    """A rank's life: one request after the other until the pool closes the pipe."""
    with _stack_path(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if backend == "nccl":
            _share_one_gpu(rank)
        if backend is not None:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=RUN_LIMIT_S),
            )
        pipe.send_bytes(pickle.dumps((True, None)))
        gc.freeze()  # what is imported by now is not looked through after each request
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                break
            pipe.send_bytes(_answer(message))
        os._exit(0)  # an orderly exit with gloo takes seconds


def _answer(message: bytes) -> bytes:
    forget_what_others_kept()
    # Plain pickle, not the pipe's own: that one would share tensors through file descriptors that die with the rank.
    try:
        fn, args, kwargs = pickle.loads(message)
        answer = pickle.dumps((True, fn(*args, **kwargs)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    gc.collect()
    return answer
