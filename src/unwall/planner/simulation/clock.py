"""A virtual clock: queues of work that run beside each other and slow each other down where they share something.

A queue runs its tasks one after the other, each when what it waits for is done. Tasks at work at once share the limits they
load: where the loads exceed a limit, all of them slow down alike.
"""

from collections import deque
from collections.abc import Mapping, Sequence


class Task:
    """Work in a queue."""

    __slots__ = ("after", "done", "left_s", "loads", "name")

    def __init__(self, name: str, seconds: float, after: Sequence["Task"], loads: Mapping[str, float]) -> None:
        self.name = name
        self.left_s = seconds
        self.loads = loads
        self.done: bool = False
        self.after = [task for task in after if not task.done]

    def ready(self) -> bool:
        while self.after and self.after[-1].done:
            self.after.pop()
        return not self.after


class Clock:
    """``limits``: what tasks share, by name, with its capacity (1 is what one task at full speed may take)."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self.now_s = 0.0
        self.busy_s: dict[str, float] = {}
        """Work of each queue, at full speed, since the last reset."""
        self._limits = limits
        self._queues: dict[str, deque[Task]] = {}

    def submit(
        self, queue: str, seconds: float, after: Sequence[Task] = (), loads: Mapping[str, float] | None = None, name: str = ""
    ) -> Task:
        """Puts work at the end of a queue. ``loads``: how much of each limit it takes at full speed."""
        task = Task(name, seconds, after, loads or {})
        self._queues.setdefault(queue, deque()).append(task)
        self.busy_s[queue] = self.busy_s.get(queue, 0.0) + seconds
        return task

    def wait(self, task: Task) -> None:
        """Lets time pass until a task is done."""
        while not task.done:
            self._advance()

    def drain(self, *queues: str) -> None:
        """Lets time pass until these queues are empty."""
        for queue in queues:
            while self._queues.get(queue):
                self.wait(self._queues[queue][-1])

    def _advance(self) -> None:
        """To the next moment at which a task ends."""
        active = [queue[0] for queue in self._queues.values() if queue and queue[0].ready()]
        if not active:
            stuck = ", ".join(f"{name}: {queue[0].name}" for name, queue in self._queues.items() if queue)
            raise RuntimeError(f"the simulation cannot go on: each of these waits for another ({stuck})")
        speeds = self._speeds(active)
        passed = min(task.left_s / speed for task, speed in zip(active, speeds, strict=True))
        self.now_s += passed
        for task, speed in zip(active, speeds, strict=True):
            task.left_s -= passed * speed
            task.done = task.left_s <= 1e-12 * max(1.0, self.now_s)
        for queue in self._queues.values():
            if queue and queue[0].done:
                queue.popleft()

    def _speeds(self, active: Sequence[Task]) -> list[float]:
        if not any(task.loads for task in active):
            return [1.0] * len(active)
        total: dict[str, float] = {}
        for task in active:
            for name, load in task.loads.items():
                total[name] = total.get(name, 0.0) + load
        shares = {name: min(1.0, self._limits[name] / load) for name, load in total.items() if load > 0}
        return [min((shares.get(name, 1.0) for name in task.loads), default=1.0) for task in active]
