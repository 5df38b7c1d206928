"""What ``step`` makes of a group that was updated ahead of it."""

from unwall.optim.journaled import JournaledUpdate
from unwall.optim.speculation import Progress, Speculation
from unwall.optim.updates import Factor, Rest, Work
from unwall.runtime.engine import Engine


class Commit:
    """Commits a speculation, or gives it up and updates in place. Called on the thread that updates; called again, after an
    update in place has failed, it does only what is left of that."""

    def __init__(self, engine: Engine, speculation: Speculation, factor: Factor, otherwise: Work) -> None:
        self._engine = engine
        self._speculation = speculation
        self._factor = factor
        self._otherwise = otherwise

    def __call__(self) -> Rest | None:
        if self._speculation.progress is Progress.RESOLVED or not self._resolve():
            return self._otherwise()
        return None

    def _resolve(self) -> bool:
        """Whether the speculation is the update. It holds only where ``step`` uses the gradients as they are."""
        found, scale = self._speculation, self._factor.get()
        found.await_end()  # its last writes may be under way
        committed = scale == 1.0 and found.progress is Progress.FINISHED
        if committed:
            assert found.shadow is not None
            found.shadow.swap(found.stores)
            self._engine.speculation.committed += 1
        else:
            self._engine.speculation.missed += scale != 1.0  # otherwise it was only too late
        found.progress = Progress.RESOLVED
        return committed


class KeepOrRedo:
    """The same for an update in place: kept, or taken back and done again with the factor of the step."""

    def __init__(self, engine: Engine, update: JournaledUpdate, factor: Factor, otherwise: Work) -> None:
        self._engine = engine
        self._update = update
        self._factor = factor
        self._otherwise = otherwise

    def __call__(self) -> Rest | None:
        scale = self._factor.get()
        if not self._update.resolve(scale):
            return self._otherwise()
        if scale == 1.0:
            self._engine.speculation.committed += 1
            self._engine.speculation.in_place += 1
        else:
            self._engine.speculation.missed += 1
        return None


class TakeBack:
    """For an update in place that does not count: taken back, and done anew."""

    def __init__(self, update: JournaledUpdate, otherwise: Work) -> None:
        self._update = update
        self._otherwise = otherwise

    def __call__(self) -> Rest | None:
        self._update.give_up()
        return self._otherwise()
