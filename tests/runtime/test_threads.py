"""Several threads on one sharded model: each gets what it would have got alone, or is told."""

import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import unwall
from unwall.api import engine
from unwall.plans import Plan
from unwall.runtime import forward, turns
from unwall.shards import default_hooks

WIDTH, ROUNDS = 32, 12
PLACES = {
    "device": {},
    "host": {"params": "host", "optimizer": "host", "device_bytes": 8 * 4 * (WIDTH * WIDTH + WIDTH + 2048)},
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def start(place, **options):
    model = build()
    unwall.shard(model, Plan(compute_dtype=torch.float32, **PLACES[place]))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, **options)


def inputs(seed):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model, optimizer, seeds):
    for seed in seeds:
        model(inputs(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def outputs(model, seeds):
    return [model(inputs(seed)) for seed in seeds]


def together(*works):
    """Runs them at the same time, each on a thread of its own, and gives their results."""
    ready = threading.Barrier(len(works))

    def run(work):
        ready.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(run, work) for work in works]]


@pytest.mark.parametrize("place", PLACES)
def test_two_evaluations(place):
    model, _ = start(place)
    plain = build()
    seeds = range(4 * ROUNDS), range(100, 100 + 4 * ROUNDS)
    found = together(*[lambda these=these: outputs(model, these) for these in seeds])
    for these, got in zip(seeds, found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(got, outputs(plain, these), strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_an_evaluation_and_state_dicts_beside_training(place):
    calm, calm_optimizer = start(place)
    states = [calm.state_dict()]
    for seed in range(ROUNDS):
        train(calm, calm_optimizer, [seed])
        states.append(calm.state_dict())
    model, optimizer = start(place)
    _, evaluated, saved = together(
        lambda: train(model, optimizer, range(ROUNDS)),
        lambda: [outputs(model, [7])[0] for _ in range(ROUNDS)],
        lambda: [model.state_dict() for _ in range(ROUNDS)],
    )
    plain = build()
    possible = []
    for state in states:
        plain.load_state_dict(state)
        possible += outputs(plain, [7])
    assert all(any(torch.equal(one, other) for other in possible) for one in evaluated)  # of a moment between two steps
    for state in saved:
        assert any(all(torch.equal(state[name], other[name]) for name in state) for other in states)
    assert all(torch.equal(value, states[-1][name]) for name, value in model.state_dict().items())


def test_a_parameter_that_another_thread_looks_up_is_refused():
    model, _ = start("host")
    refused = []

    def look(*_):
        def read():
            with pytest.raises(RuntimeError, match="read by thread 'reader' while thread 'MainThread'"):
                refused.append(model[4].weight.norm())

        thread = threading.Thread(target=read, name="reader")
        thread.start()
        thread.join()
        refused.append("once")

    handle = model[3].register_forward_hook(look)
    got = outputs(model, [1])[0]
    handle.remove()
    assert refused == ["once"]
    assert torch.equal(got, outputs(build(), [1])[0])


def test_a_forward_that_waits_for_threads_of_its_own_is_told(monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 0.2)

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x):
            return sum(together(*[lambda part=part: part(x) for part in self.parts]))

    model = Split()
    unwall.shard(model, Plan(params="host", optimizer="host", compute_dtype=torch.float32))
    with pytest.raises(RuntimeError, match="must not wait for threads that run parts of it"):
        model(inputs(0))
    assert model.parts[0](inputs(0)).shape == (4, WIDTH)  # the model is usable


def test_a_thread_that_ended_in_the_middle_holds_nobody_up():
    model, _ = start("host")

    def stop(*_):
        raise KeyboardInterrupt

    handle = model[5].register_forward_hook(stop)

    def work():
        with pytest.raises(KeyboardInterrupt):
            model(inputs(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    handle.remove()
    assert torch.equal(outputs(model, [1])[0], outputs(build(), [1])[0])


class Stopping:
    """Ends a pass of the thread that asked for it with an interrupt, in its forward or its backward."""

    def __init__(self, model):
        self.model, self.thread = model, 0
        model[5].register_forward_hook(self)

    def __call__(self, module, args, output):
        if self.thread == threading.get_ident():
            self.thread = 0
            if not self.in_backward:
                raise KeyboardInterrupt
            output.register_hook(self.stop)

    def stop(self, _):
        raise KeyboardInterrupt

    def interrupt(self, in_backward):
        """The interrupt that has ended a pass, with its traceback."""
        self.in_backward, self.thread = in_backward, threading.get_ident()
        with pytest.raises(KeyboardInterrupt) as caught:
            self.model(inputs(0)).sum().backward()
        return caught


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_interrupted_pass_is_found_over_without_following_another_threads_frames(in_backward, monkeypatch):
    """That thread runs on meanwhile, and the interpreter may hand out a frame that is gone."""

    def refused():
        raise AssertionError("frames of other threads")

    model, optimizer = start("host")
    kept = Stopping(model).interrupt(in_backward)  # as a notebook keeps it
    monkeypatch.setattr(sys, "_current_frames", refused)
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 200)
    (got,) = together(lambda: outputs(model, [1])[0])
    assert torch.equal(got, outputs(build(), [1])[0])
    together(lambda: train(model, optimizer, range(2)), lambda: outputs(model, range(8)))
    assert kept.type is KeyboardInterrupt


@pytest.mark.parametrize("seen", [True, False])
def test_hooks_of_an_interrupted_pass_go_whoever_finds_it_over(seen):
    """Otherwise they would be the first to get whatever this thread saves from then on, of whatever model."""
    model, _ = start("host")
    Stopping(model).interrupt(in_backward=False)
    if seen:
        together(lambda: outputs(model, [1]))
    other, _ = start("host")
    other(inputs(0))
    assert default_hooks.top() is None


def test_a_thread_that_comes_changes_nothing_before_its_turn(monkeypatch):
    """It looked for calls when there were none, and goes on in the middle of another thread's."""
    model, _ = start("device")
    turn = engine(model).turn
    looked, inside, waits = threading.Event(), threading.Event(), threading.Event()
    wait = turns.Turn._wait

    def slowly():
        caller = sys._getframe(3)
        if threading.current_thread().name == "second":
            looked.set()
            inside.wait()
        return caller

    def waiting(self, what):
        waits.set()
        wait(self, what)

    monkeypatch.setattr(forward, "caller_of_hook", slowly)
    monkeypatch.setattr(turns.Turn, "_wait", waiting)
    tokens = []

    def meet(*_):
        if threading.current_thread() is threading.main_thread():
            tokens.append(turn._token)
            inside.set()
            waits.wait()

    model[3].register_forward_pre_hook(meet)  # the hook that ends its call has not run yet
    model[9].register_forward_pre_hook(meet)
    second = threading.Thread(target=outputs, args=(model, [1]), name="second")
    second.start()
    looked.wait()
    outputs(model, [0])
    second.join()
    assert tokens[0] is tokens[1]  # one turn from beginning to end


def test_a_pass_after_an_interrupt_inside_a_block_is_a_turn():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)])
    unwall.shard(model, Plan(compute_dtype=torch.float32, params="host", optimizer="host"))
    turn, mine = engine(model).turn, []

    def stop(*_):
        raise KeyboardInterrupt

    handle = model[2][1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(inputs(0))
    handle.remove()
    for block in model:
        block[1].register_forward_hook(lambda *_: mine.append(turn.is_mine(turn._during) and turns.is_executed(turn._during)))
    model(inputs(0))
    assert mine == [True] * 4
    together(lambda: outputs(model, [1]))


def test_a_thread_that_works_for_the_one_whose_turn_it_is():
    """As autograd's threads do for whoever calls backward inside a forward: torch hands them the caller's context."""
    turn = turns.Turn(2, lambda: 0)
    turn.begin("a forward", sys._getframe())
    context = contextvars.copy_context()

    def work():
        torch._C._stash_obj_in_tls("context", context)
        turn.begin("backward", lambda: True, backward=True)
        turn.end()

    def refuse():
        with pytest.raises(RuntimeError, match="one thread uses a model"):
            turn.begin("backward", lambda: True, backward=True)

    together(work)
    together(refuse)
    assert turn.is_mine()
    turn.end()
    together(lambda: turn.begin("a forward", sys._getframe()))  # it is over


def test_whoever_called_a_backward_that_failed_waits_for_its_thread_to_let_go(monkeypatch):
    """On an accelerator the caller hears of the exception while autograd's thread still has the graph task."""
    monkeypatch.setattr(turns, "GRACE_SECONDS", 0.0)
    turn, begun, hears, over = turns.Turn(2, lambda: 0), threading.Event(), threading.Event(), []
    with turn.held("a forward"):
        pass
    context = contextvars.copy_context()

    def work():
        torch._C._stash_obj_in_tls("context", context)
        turn.begin("backward", lambda: not over, backward=True)
        begun.set()
        hears.wait()
        over.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()

    def refuse():
        with pytest.raises(RuntimeError, match="one thread uses a model"):
            turn.begin("zero_grad")

    together(refuse)
    together(lambda: context.run(refuse))  # as asyncio.to_thread starts threads
    with turns.Turn(2, lambda: 0).held("a step of another model"):
        pass
    assert not over
    hears.set()
    with turn.held("zero_grad"):
        assert over
    thread.join()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_backward_whose_caller_is_not_known_is_waited_for_where_it_uses_nothing_more(goes_on):
    """Not every version of torch tells autograd's threads who called. What goes on is another thread's: that is refused."""
    looks, over = [], []

    def still_runs():
        looks.append(None)
        if len(looks) > 3 and not goes_on:
            over.append(True)
        return not over

    turn = turns.Turn(2, lambda: len(looks) if goes_on else 0)
    together(lambda: turn.begin("backward", still_runs, backward=True))
    if goes_on:
        with pytest.raises(RuntimeError, match="one thread uses a model"):
            turn.begin("zero_grad")
        return
    with turn.held("zero_grad"):
        assert over


@pytest.fixture
def restless():
    """Threads take turns in the interpreter after each few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.drill
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("place", PLACES)
def test_many_threads_and_interrupts(place):
    """One thread trains, is interrupted in every other step and tries again; five others evaluate."""
    calm, calm_optimizer = start(place)
    states = [calm.state_dict()]
    for seed in range(ROUNDS):
        train(calm, calm_optimizer, [seed])
        states.append(calm.state_dict())
    plain, possible = build(), []
    for state in states:
        plain.load_state_dict(state)
        possible += outputs(plain, [7])
    for _ in range(8):
        model, optimizer = start(place)

        def train_nervously(model=model, optimizer=optimizer):
            stopping = Stopping(model)
            for seed in range(ROUNDS):
                if seed % 2:
                    stopping.interrupt(in_backward=seed % 4 == 1)
                    optimizer.zero_grad()
                train(model, optimizer, [seed])

        evaluate = [lambda model=model: [outputs(model, [7])[0] for _ in range(2 * ROUNDS)]] * 5
        _, *evaluated = together(train_nervously, *evaluate)
        assert all(any(torch.equal(one, other) for other in possible) for these in evaluated for one in these)
        assert all(torch.equal(value, states[-1][name]) for name, value in model.state_dict().items())


def run_over_ranks():
    model, _ = start("host")
    told = []

    def look(*_):
        def use():
            try:
                model(inputs(0))
            except RuntimeError as error:
                told.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    handle = model[3].register_forward_hook(look)
    got = outputs(model, [1])[0]
    handle.remove()
    return told, torch.equal(got, outputs(build(), [1])[0])


def test_over_several_ranks_one_thread_uses_the_model(ranks):
    for told, right in ranks(2).run(run_over_ranks):
        assert len(told) == 1
        assert "Over several ranks one thread" in told[0]
        assert right
