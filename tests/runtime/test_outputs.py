"""Finding the tensors in what a module returns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from unwall.runtime.outputs import tensors_in


class Counted(Mapping):
    """A container that counts how often it is looked into."""

    def __init__(self, **parts):
        self.parts = parts
        self.visits = 0

    def values(self):
        self.visits += 1
        return self.parts.values()

    def __getitem__(self, name):
        return self.parts[name]

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)


class Thing:
    """A plain object."""

    def __init__(self, **parts):
        self.__dict__.update(parts)


@dataclass
class Output:
    loss: torch.Tensor
    hidden: list


def numbers(value):
    """The tensors that are found, by what is in them, in order."""
    return [int(tensor) for tensor in tensors_in(value)]


def test_objects_that_refer_to_each_other_are_looked_at_once():
    things = [Counted(value=torch.tensor(number)) for number in range(7)]
    for thing in things:
        thing.parts.update({f"other {number}": other for number, other in enumerate(things)})
    assert sorted(numbers(things[0])) == list(range(7))
    assert [thing.visits for thing in things] == [1] * 7


def test_containers_dataclasses_and_plain_objects():
    nested = Output(torch.tensor(0), [torch.tensor(1), (torch.tensor(2), {"a": torch.tensor(3)})])
    assert sorted(numbers({"x": nested, "y": Thing(deep=Thing(value=torch.tensor(4))), "z": {5: None}})) == [0, 1, 2, 3, 4]
    assert numbers(torch.tensor(7)) == [7]
    assert numbers("text") == numbers(None) == numbers(3) == []


def test_what_is_met_deep_down_first_is_found_by_the_short_way_too():
    """The first way to an object may be too long to go on from there."""
    end = Thing(value=torch.tensor(1))
    long = end
    for _ in range(7):
        long = [long]
    assert numbers([long, end]) == [1]


def test_modules_classes_and_libraries_are_no_results():
    class Kept:
        value = torch.tensor(1)

    module = nn.Linear(2, 2)
    assert list(tensors_in([module, Kept, torch, Thing(library=torch.nn, made_by=module)])) == []
