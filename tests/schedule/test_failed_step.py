"""A step on several ranks that one of them cannot take, and a Ctrl-C of one of them in a step."""

import signal

from faults import forward, same, sharded
from ranks import rank_and_world

from unwall.optim import sharded as sharded_module
from unwall.shards.control import DivergedError


def step_without_memory(folder):
    """Rank 1 has no memory for its step. Then both run on: what each is told, and what comes with its own error."""
    model, optimizer = sharded("host", folder)
    settle, told = sharded_module.settle, []

    def refuse(group):
        raise MemoryError("told to")

    forward(model, 0).backward()
    try:
        sharded_module.settle = refuse if rank_and_world()[0] == 1 else settle
        optimizer.step()
    except MemoryError as error:
        told += error.__notes__
    finally:
        sharded_module.settle = settle
    try:
        forward(model, 1).backward()
    except DivergedError as error:
        told.append(str(error))
    return told


def interrupted_step(folder, strikes):
    """Rank 1 is interrupted in its second step, once it waits for something there. Its values, and how often it was."""
    model, optimizer = sharded("host", folder)
    settle, caught = sharded_module.settle, 0

    def interrupt(group):
        signal.raise_signal(signal.SIGINT)
        sharded_module.settle = settle
        sharded_module.interrupts.check()  # as a wait does that takes long
        settle(group)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for number in range(3):
            forward(model, number).backward()
            sharded_module.settle = interrupt if strikes and (number, rank_and_world()[0]) == (1, 1) else settle
            try:
                optimizer.step()
            except KeyboardInterrupt:
                caught += 1
    finally:
        signal.signal(signal.SIGINT, before)
        sharded_module.settle = settle
    return model.state_dict(), caught


def test_an_interrupt_waits_for_the_end_of_a_step_of_all_ranks(ranks, tmp_path):
    expected = ranks(2).run(interrupted_step, str(tmp_path), False)[0][0]
    (got, _), (_, caught) = ranks(2).run(interrupted_step, str(tmp_path), True)
    assert caught == 1
    assert same(expected, got)


def test_a_step_that_one_rank_cannot_take_says_what_to_do(ranks, tmp_path):
    """The last one here: these ranks cannot go on."""
    other, own = ranks(2).run(step_without_memory, str(tmp_path))
    assert "Start all ranks again from a checkpoint" in own[0]
    for told in (other[-1], own[-1]):
        assert "MemoryError: told to" in told
        assert "Start all ranks again from a checkpoint" in told
