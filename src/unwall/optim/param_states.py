"""The states of one parameter, to read and to set by hand."""

from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from unwall.optim.seen_states import SeenState, seen_states
from unwall.runtime.early_writes import refuse_early_write
from unwall.runtime.elements import RunOf, is_local, part_of, put, put_part, shape_of, whole_of
from unwall.runtime.whole import put_whole
from unwall.shards.group import Group
from unwall.shards.master import read_master, write_master

if TYPE_CHECKING:
    from unwall.optim.sharded import ShardedOptimizer

MASTER = "master"


class ParamNumbers(dict[str, Any]):
    """``optimizer.state[param]``: the step count. States as large as the parameter live on their tier."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"optimizer.state[param][{name!r}]: the states of a sharded model live in shards, on their tier. Write "
            f"optimizer.states(param)[{name!r}]"
        )


class NumbersOfAll(defaultdict[torch.Tensor, Any]):
    """``optimizer.state``. Whoever empties it means the moments, too, which are not there: that is refused."""

    version = 0
    """Counts entries that were put in or taken out."""

    def __setitem__(self, param: torch.Tensor, numbers: Any) -> None:
        self.version += 1
        super().__setitem__(param, numbers)

    def update(self, *others: Any, **more: Any) -> None:
        for param, numbers in dict(*others, **more).items():
            self[param] = numbers

    def __ior__(self, others: Any) -> "NumbersOfAll":  # type: ignore[override,misc]
        self.update(others)
        return self

    def leave_out(self, param: torch.Tensor) -> None:
        """A parameter that was never updated has no numbers."""
        self.version += 1
        super().pop(param, None)

    def __delitem__(self, param: torch.Tensor) -> NoReturn:
        refuse_forgetting()

    def pop(self, *_: Any) -> NoReturn:
        refuse_forgetting()

    def popitem(self) -> NoReturn:
        refuse_forgetting()

    def clear(self) -> NoReturn:
        refuse_forgetting()


def refuse_forgetting() -> NoReturn:
    raise RuntimeError(
        "optimizer.state was emptied or replaced, but the states of a sharded model live in shards, on their tier, and would "
        "stay. To begin anew build another optimizer, or set optimizer.states(param)[name] and its 'step' to zero"
    )


class ParamStates(MutableMapping[str, Any]):
    """What an optimizer keeps of one parameter, by name, and the parameter in full precision as ``"master"``::

        states = optimizer.states(model.head.weight)
        states["exp_avg"].norm()
        states["exp_avg_sq"] = torch.zeros_like(model.head.weight, dtype=torch.float32)
        states["step"] = 0

    Tensors come whole, as copies on the device, from whatever tier they live on; all ranks read and set them together, and set
    the same. ``part`` and ``set_part`` are about this rank's elements alone, flat, and wait for no other rank; of ``"master"``
    all ranks call ``set_part``, also those that keep none of it. ``list(states)`` says which there are: the rule's
    (``exp_avg`` and ``exp_avg_sq`` of AdamW, those of a wrapped optimizer), numbers such as ``step``, and ``master``. States
    cannot be deleted.
    """

    def __init__(self, optimizer: "ShardedOptimizer", param: nn.Parameter) -> None:
        if not any(param is known for known in optimizer._params()):
            raise KeyError(f"a parameter of shape {tuple(param.shape)} that this optimizer does not update")
        self._optimizer = optimizer
        self._param = param
        self._engine = optimizer._engine_of(param)
        self._places = self._engine.places[id(param)]

    def __iter__(self) -> Iterator[str]:
        yield from self._optimizer._tensor_names(self._param)
        yield from self._optimizer._numbers_of(self._param)
        yield MASTER

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        """The whole tensor, or a number."""
        numbers = self._optimizer._numbers_of(self._param)
        if name in numbers:
            return numbers[name]
        self._look(name)
        if not is_local(self._engine, self._places):
            self._engine.together("a whole state of the optimizer")
        return whole_of(self._engine, self._places, self._reader(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets it, to the same on every rank."""
        if name in self._optimizer._numbers_of(self._param):
            self._optimizer._set_number(self._param, name, value)
            return
        self._look(name)
        expected = shape_of(self._engine, self._places)
        value = torch.as_tensor(value)
        if value.shape != expected:
            raise ValueError(f"the parameter's {name!r} has shape {tuple(expected)}, got {tuple(value.shape)}")
        if name == MASTER:
            with torch.no_grad():
                put_whole(self._engine, self._param, value)
        else:
            self._changed()
            with self._writer(name) as run_of:
                put(self._engine, self._places, run_of, value)
        self._engine.groups[0].pending.staging.close()

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"states cannot be deleted: set {name!r} instead")

    def part(self, name: str) -> torch.Tensor:
        """This rank's elements, flat, as a copy. They may be none."""
        self._look(name)
        return part_of(self._engine, self._places, self._reader(name))

    @torch.no_grad()
    def set_part(self, name: str, value: torch.Tensor) -> None:
        """Sets this rank's elements: as many as ``part`` gives."""
        self._look(name)
        self._changed()
        if name != MASTER:
            with self._writer(name) as run_of:
                put_part(self._engine, self._places, run_of, value)
        else:
            whole = part_of(self._engine, self._places, self._reader(name))
            if value.numel() != whole.numel():
                raise ValueError(f"this rank keeps {whole.numel()} elements of the parameter, got {value.numel()}")
            self._set_master_part(value.reshape(-1))
        self._engine.groups[0].pending.staging.close()

    def _set_master_part(self, flat: torch.Tensor) -> None:
        self._engine.executor.note("optimizer.states(...).set_part('master')")  # others hold copies of it
        self._engine.version += 1
        segments = [
            (segment, index)
            for index, slot in self._places
            for segment in self._engine.groups[index].owned_segments()
            if segment.slot == slot
        ]
        at = 0
        for segment, index in sorted(segments, key=lambda entry: entry[0].start):
            write_master(self._engine.groups[index], segment.shard_start, flat[at : at + segment.numel])
            at += segment.numel
        for index, _ in self._places:  # on every rank, also one that keeps nothing of it
            self._engine.executor.invalidate(index)

    def _look(self, name: str) -> None:
        """Nothing is under way any more. KeyError for what there is not."""
        if name != MASTER and name not in self._optimizer._tensor_names(self._param):
            raise KeyError(f"{name!r}: there are {', '.join(self)}")
        self._engine.finish()

    def _changed(self) -> None:
        refuse_early_write(self._engine, [self._param], "a write to an optimizer's state")
        self._optimizer.own.touched = True
        for index, _ in self._places:
            self._engine.groups[index].generation += 1

    def _reader(self, name: str) -> RunOf:
        if name == MASTER:
            return read_master
        return lambda group: self._state(group, name).read()

    @contextmanager
    def _writer(self, name: str) -> Iterator[RunOf]:
        """What is kept in another form than it is seen in is written at the end."""
        coded: list[tuple[SeenState, torch.Tensor]] = []

        def run_of(group: Group) -> torch.Tensor:
            state = self._state(group, name)
            if not state.coded:
                return state.store.tensor()
            coded.append((state, state.read()))
            return coded[-1][1]

        yield run_of
        for state, values in coded:
            state.encode(state.store.tensor(), values)

    def _state(self, group: Group, name: str) -> SeenState:
        optimizer = self._optimizer
        return next(state for state in seen_states(optimizer.rule, optimizer.own, group) if state.spec.name == name)
