"""What ``step`` makes of a group that was updated ahead of it."""

from collections.abc import Callable

from unwall.optim.speculation import Progress, Speculation
from unwall.optim.updates import Factor
from unwall.runtime.engine import Engine


class Commit:
    """Commits a speculation, or gives it up and updates in place. Called on the thread that updates; called again, after an
    update in place has failed, it does only what is left of that."""

    def __init__(self, engine: Engine, speculation: Speculation, factor: Factor, otherwise: Callable[[], None]) -> None:
        self._engine = engine
        self._speculation = speculation
        self._factor = factor
        self._otherwise = otherwise

    def __call__(self) -> None:
        if self._speculation.progress is Progress.RESOLVED or not self._resolve():
            self._otherwise()

    def _resolve(self) -> bool:
        """Whether the speculation is the update. It holds only where ``step`` uses the gradients as they are."""
        found, scale = self._speculation, self._factor.get()
        committed = scale == 1.0 and found.progress is Progress.FINISHED
        if committed:
            found.shadow.swap(found.stores)
            self._engine.speculation.committed += 1
        else:
            self._engine.speculation.missed += scale != 1.0  # otherwise it was only too late
        found.progress = Progress.RESOLVED
        return committed
