"""The user's own code around a step fails on one rank, or on all of them: hooks, options, numbers that differ, a data loader."""

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import Boom, Net, forward, same, sharded
from ranks import rank_and_world
from reference import seeded
from torch.distributed.device_mesh import DeviceMesh

import unwall
from unwall.plans import Plan
from unwall.runtime.hooks import engine_of
from unwall.schedule import standing
from unwall.shards.control import DivergedError, PeerError

STEPS = 4


def await_the_other(path):
    """Without using the model. A test that waits for ever is ended by its limit."""
    while not path.exists():
        time.sleep(0.01)


def hook_of(optimizer, kind, rank, bad, when):
    """Raises once on the ranks that are ``bad``, in the step of that number."""

    def raising(*_):
        if raising.number == when and rank in bad:
            raising.number = -1
            raise Boom("told to")

    raising.number = 0
    register = optimizer.register_step_pre_hook if kind == "pre" else optimizer.register_step_post_hook
    register(raising)
    return raising


def train(folder, tier="host", kind="pre", bad=(), when=2, max_grad_norm=None):
    """The whole model (rank 0), and what this rank was told. A rank that failed alone waits until the other has heard of it."""
    model, optimizer = sharded(tier, folder)
    optimizer.max_grad_norm = max_grad_norm
    rank, told, heard = rank_and_world()[0], [], Path(folder) / f"{tier}-{kind}-{bad}-{max_grad_norm}"
    hook = hook_of(optimizer, kind, rank, bad, when)
    patience, standing.ALIKE_S = standing.ALIKE_S, 60.0 if len(bad) > 1 else 0.0
    try:
        for number in range(STEPS):
            hook.number = number if hook.number >= 0 else -1
            for _ in range(3):
                stepped = False
                try:
                    forward(model, number).backward()
                    optimizer.step()
                    break
                except Boom as error:
                    told.append((type(error).__name__, str(error), getattr(error, "__notes__", [])))
                    if len(bad) == 1:
                        await_the_other(heard)
                    stepped = kind == "post"
                except DivergedError as error:
                    told.append((type(error).__name__, str(error), []))
                    heard.touch()
                    if not isinstance(error, PeerError):
                        return None, told
                optimizer.zero_grad()
                if stepped:
                    break
        return model.state_dict(), told
    finally:
        standing.ALIKE_S = patience


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_hook_that_raises_on_all_ranks_is_their_own_matter(ranks, tmp_path, kind, max_grad_norm):
    """They try again (before the step) or go on (after it), in whatever way they agree on what comes next."""
    expected = ranks(2).run(train, str(tmp_path), max_grad_norm=max_grad_norm)[0][0]
    every = ranks(2).run(train, str(tmp_path), kind=kind, bad=(0, 1), max_grad_norm=max_grad_norm)
    assert same(expected, every[0][0])
    for _, told in every:
        assert told == [("Boom", "told to", [])]


def test_nobody_has_taken_the_step_before_which_a_hook_raises(ranks, tmp_path):
    """With gradients on disk the ranks meet before the update: all go on together."""
    expected = ranks(2).run(train, str(tmp_path), tier="disk")[0][0]
    (got, told), (_, own) = ranks(2).run(train, str(tmp_path), tier="disk", bad=(1,))
    assert same(expected, got)
    assert [name for name, *_ in own] == ["Boom"]
    assert [name for name, *_ in told] == ["PeerError"]
    assert "rank 1 failed: Boom: told to" in told[0][1]


def test_a_hook_after_the_step_raises_on_one_rank(ranks, tmp_path):
    (_, told), (_, own) = ranks(2).run(train, str(tmp_path), kind="post", bad=(1,))
    assert [name for name, *_ in own] == ["Boom"]
    assert [name for name, *_ in told] == ["PeerError"]
    assert "rank 1 failed: Boom: told to" in told[0][1]


def train_two(folder):
    """One optimizer over two models. Rank 1 fails before its second step, which nobody has taken."""
    rank, told = rank_and_world()[0], []
    models = []
    for name in ("first", "second"):
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        models.append(sharded("disk", str(place))[0])
    optimizer = unwall.AdamW([param for model in models for param in model.parameters()], lr=1e-2, speculate=False)
    hook = hook_of(optimizer, "pre", rank, (1,), 1)
    patience, standing.ALIKE_S = standing.ALIKE_S, 0.0
    try:
        for number in range(3):
            hook.number = number if hook.number >= 0 else -1
            for _ in range(2):
                try:
                    for model in models:
                        forward(model, number).backward()
                    optimizer.step()
                    break
                except (Boom, DivergedError) as error:
                    told.append((number, type(error).__name__))
                    optimizer.zero_grad()
    finally:
        standing.ALIKE_S = patience
    return told


def test_models_of_one_optimizer_go_on_together(ranks, tmp_path):
    assert ranks(2).run(train_two, str(tmp_path)) == [[(1, "PeerError")], [(1, "Boom")]]


def over_its_own_ranks():
    mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("dp",))
    model = seeded(Net)
    unwall.shard(model, Plan(compute_dtype=torch.float32), mesh)
    return model


def apart(folder, name):
    """A model over a set of ranks of its own: they cannot go on afterwards, and the tests that follow are none of it."""
    model = over_its_own_ranks()
    optimizer = unwall.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0 if name == "clipped" else None)
    return model, optimizer, rank_and_world()[0], Path(folder) / name


def train_two_sets(folder):
    """One optimizer over two models with ranks of their own. Rank 1 fails after its second step; rank 0 goes on with the second
    of them. What each is told."""
    models, (rank, _), heard = [over_its_own_ranks() for _ in range(2)], rank_and_world(), Path(folder) / "two-sets"
    optimizer = unwall.AdamW([param for model in models for param in model.parameters()], lr=1e-2)
    hook = hook_of(optimizer, "post", rank, (1,), 1)
    patience, standing.ALIKE_S = standing.ALIKE_S, 0.0
    try:
        for number in range(3):
            hook.number = number if hook.number >= 0 else -1
            for model in models if number < 2 else models[1:]:
                forward(model, number).backward()
            optimizer.step()
    except (Boom, DivergedError) as error:
        heard.touch() if rank == 0 else await_the_other(heard)
        return type(error).__name__, str(error)
    finally:
        standing.ALIKE_S = patience


def test_models_of_one_optimizer_over_several_sets_of_ranks(ranks, tmp_path):
    """Whoever waits is told, in whichever of them."""
    other, mine = ranks(2).run(train_two_sets, str(tmp_path))
    assert mine == ("Boom", "told to")
    assert other[0] == "PeerError"
    assert "rank 1 failed: Boom: told to" in other[1]


def fail_alone(folder, name):
    """Rank 1 fails around its third step, waits until the other one has heard of it, and runs on. What each is told."""
    model, optimizer, rank, heard = apart(folder, name)
    patience = standing.ALIKE_S, standing.PATIENCE_S
    standing.ALIKE_S, standing.PATIENCE_S = 0.0, 60.0  # the one who fails knows how it ends, however slow the other one is
    told = []
    try:
        for number in range(4):
            if (number, rank) == (3, 1):
                if name == "option":
                    optimizer.param_groups[0]["lr"] = "a word"
                else:
                    hook_of(optimizer, "pre", rank, (1,), 0)
            try:
                forward(model, number).backward()
                optimizer.step()
            except (Boom, ValueError) as error:
                told.append((type(error).__name__, str(error), error.__notes__))
                await_the_other(heard)
        while name == "late" and rank == 0 and not engine_of(next(model.parameters())).ranks.control.watch.fault:
            time.sleep(0.01)
        forward(model, 5)
    except DivergedError as error:
        told.append((type(error).__name__, str(error), []))
        heard.touch()
    finally:
        standing.ALIKE_S, standing.PATIENCE_S = patience
    return told


@pytest.mark.parametrize(("name", "own"), [("plain", "Boom"), ("late", "Boom"), ("clipped", "Boom"), ("option", "ValueError")])
def test_a_step_that_only_the_others_take(ranks, tmp_path, name, own):
    """``late``: they hear of the fault before they meet."""
    other, mine = ranks(2).run(fail_alone, str(tmp_path), name)
    assert [kind for kind, *_ in mine] == [own, "DivergedError"]
    assert "Start all ranks again from a checkpoint" in mine[0][2][0]
    assert [kind for kind, *_ in other] == ["DivergedError"]
    assert own in other[0][1]
    assert "tart all ranks again from a checkpoint" in other[0][1]


def write_apart(folder, name):
    """Each rank writes to the first parameter: values of its own, or values that differ in the last bits."""
    model, optimizer, rank, _ = apart(folder, name)
    forward(model, 0).backward()
    optimizer.step()
    weight = model[0][0].weight
    with torch.no_grad():
        if name == "noise":
            torch.manual_seed(rank)
            torch.nn.init.normal_(weight)
        elif name == "alone":
            weight.mul_(2.0) if rank == 0 else weight.norm()
        else:
            weight.mul_(1.0 + 1e-7 * rank)
    try:
        forward(model, 1).backward()
    except DivergedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["noise", "alone"])
def test_ranks_that_write_different_values(ranks, tmp_path, name):
    for told in ranks(2).run(write_apart, str(tmp_path), name):
        assert "the mean magnitude of what was written to parameter 0.0.weight is " in told
        assert "full_params(model, write=True)" in told


def test_writes_may_differ_in_the_last_bits(ranks, tmp_path):
    assert ranks(2).run(write_apart, str(tmp_path), "rounding") == ["", ""]


def step_apart(folder, name):
    """Each rank has a number of its own."""
    model, optimizer, rank, _ = apart(folder, name)
    for number in range(3):
        forward(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0][name] = (0.8 + 0.1 * rank, 0.999) if name == "betas" else 0.5 + rank
    try:
        for number in range(2):
            forward(model, number).backward()
            optimizer.step()
    except DivergedError as error:
        return number, str(error)


@pytest.mark.parametrize(("name", "values"), [("lr", ("0.5", "1.5")), ("betas", ("0.8 and 0.999", "0.9 and 0.999"))])
def test_ranks_that_step_with_different_numbers(ranks, tmp_path, name, values):
    """They hear of it in the next forward, whoever changed what."""
    for number, told in ranks(2).run(step_apart, str(tmp_path), name):
        assert number == 1
        assert f"{name} of param group 0 is {values[0]} on rank 0, {values[1]} on rank 1" in told


def test_the_last_bits_of_what_is_almost_nothing():
    """The end of a cosine, on machines that compute it differently."""
    assert standing._close([0.0, 5.000000e-16], [1e-20, 5.0002e-16])
    assert not standing._close([1e-9], [1.1e-9])


def end_alone(folder, in_thread):
    """The script of rank 1 fails in its data loader, and its process lives on. What rank 0 is told."""
    model, optimizer, rank, heard = apart(folder, f"uncaught-{in_thread}")

    def script():
        for number in range(4):
            if (number, rank) == (3, 1):
                raise Boom("a bad sample")
            forward(model, number).backward()
            optimizer.step()

    if rank == 0:
        with pytest.raises(DivergedError) as told:
            script()
        heard.touch()
        return str(told.value)
    if in_thread:
        thread = threading.Thread(target=script)
        thread.start()
        thread.join()
    else:
        try:
            script()
        except Boom:
            sys.excepthook(*sys.exc_info())  # as the interpreter does it
    await_the_other(heard)
    return ""


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_exception_that_nobody_catches_is_told_at_once(ranks, tmp_path, in_thread):
    told, _ = ranks(2).run(end_alone, str(tmp_path), in_thread)
    assert "rank 1 has ended with Boom: a bad sample (test_failing_hooks.py, line" in told
    assert "Start all ranks again, from a checkpoint" in told
