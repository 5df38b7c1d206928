"""Draws what ``fuzz.ranks`` plays. Chances are such that most cases have a few unusual things, and some have none."""

import random
from dataclasses import dataclass, replace

import torch

from fuzz.blocks import Shape
from fuzz.scripts import Case, Deed, Failure, Pass, Places, Step, Way

KINDS = ("mlp", "mlp", "adapter", "twice", "raw", "big")
TIERS = (
    (("params", "host"), ("optimizer", "host")),
    (("params", "host"), ("optimizer", "host")),
    (("params", "device"), ("optimizer", "host")),
    (("params", "disk"), ("optimizer", "disk")),
    (("params", "host"), ("optimizer", "disk")),
    (("params", "device"), ("optimizer", "disk")),
    (),
)
RATES = (1e-2, 3e-3)


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How often a loop does what."""

    order: str
    """"same" for all ranks; or each rank's own: forward or "reversed", "shuffled", up to some "depth", with "repeats"."""
    in_backward: bool
    most_passes: int
    edits: float
    """Edits of gradients between backward and step: the chance of each of three."""
    deeds: float
    """Anything else between backward and step, and after it: the chance of each of two."""
    failures: float
    freezes: float


def draw(seed, world):
    rng = random.Random(f"{seed}-model")
    penalty = rng.choice(("detached", "embedded")) if rng.random() < 0.2 else None
    shape = draw_shape(rng, penalty)
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    optimizer = rng.choice(("AdamW",) * 4 + ("wrapped SGD", "two AdamW", "wrapped AdamW"))
    habits = draw_habits(random.Random(f"{seed}-habits"), penalty, optimizer)
    clip = rng.choice((None, None, None, 0.05, 50.0))
    return Case(
        seed=seed,
        world=world,
        shape=shape,
        script=draw_script(seed, world, shape, habits),
        most_passes=habits.most_passes,
        order=habits.order,
        dtype=dtype,
        reduce_dtype=rng.choice((None, None, torch.float32)) if dtype == torch.bfloat16 else None,
        reduce_op=rng.choice(("mean", "mean", "sum")),
        tiles=rng.choice((2, 3, 5)) if penalty is None and rng.random() < 0.25 else None,
        optimizer=optimizer,
        in_backward=habits.in_backward,
        clip=None if habits.in_backward else clip,
        places=draw_places(random.Random(f"{seed}-places"), penalty),
        speculate=rng.choice((True, "shadows") if optimizer == "two AdamW" else (True, True, "journal", "shadows")),
    )


def draw_shape(rng, penalty):
    count = rng.choice((1, 2, 3, 4, 6))
    kinds = KINDS if penalty else (*KINDS, "experts", "experts")
    ways = ("other", "reentrant") if penalty is None and rng.random() < 0.3 else ("other",)
    checkpointed = rng.choice((0.0, 0.0, 0.6, 1.0))
    return Shape(
        kinds=tuple(rng.choice(kinds) for _ in range(count)),
        experts=rng.choice((2, 3, 5)),
        checkpoints=tuple(rng.choice(ways) if rng.random() < checkpointed else None for _ in range(count)),
        frozen=tuple(at for at in range(count) if rng.random() < 0.15),
        head=rng.choice(("own", "own", "tied", "functional")),
        unused=rng.random() < 0.3,
        penalty=penalty,
    )


def draw_places(rng, penalty):
    tiers = rng.choice(TIERS)
    on_device = ("params", "device") in tiers
    return Places(
        stage=rng.choice((0, 1, 2, 3, 3, 3)),
        tiers=tiers,
        activations="keep" if penalty else rng.choice(("keep", "keep", "keep", "recompute", "auto", "host")),
        device_share=rng.choice((None, 1.0, 1.3, 2.0, 2.0)),
        host_share=None if on_device else rng.choice((None, None, None, 1.2, 2.0)),
    )


def draw_habits(rng, penalty, optimizer):
    orders = ("same", "shuffled") if penalty else ("same", "same", "reversed", "shuffled", "depth", "repeats")
    habits = Habits(
        order=rng.choice(orders),
        in_backward=optimizer == "AdamW" and rng.random() < 0.2,
        most_passes=rng.choice((1, 1, 2, 3)),
        edits=rng.choice((0.0, 0.0, 0.3, 0.7)),
        deeds=rng.choice((0.0, 0.2, 0.5)),
        failures=rng.choice((0.0, 0.0, 0.0, 0.2)),
        freezes=rng.choice((0.0, 0.0, 0.3)),
    )
    return replace(habits, most_passes=1, edits=0.0) if habits.in_backward else habits


def draw_script(seed, world, shape, habits):
    rng = random.Random(f"{seed}-script")
    return tuple(draw_step(rng, f"{seed}-{number}", world, shape, habits) for number in range(rng.choice((2, 3, 4))))


def draw_step(rng, key, world, shape, habits):
    modes = ("apart", "apart", "quiet", "forwards first", "joint", "apart" if any(shape.checkpoints) else "retained")
    count = rng.randint(1, habits.most_passes)
    failure = Failure(rank=rng.randrange(world), number=rng.randrange(count), where=rng.choice(("forward", "backward")))
    freezes = rng.randrange(len(shape.kinds)), rng.random() < 0.5
    before = [draw_edit(rng) for _ in range(3) if rng.random() < habits.edits]
    before += [draw_deed_before(rng, habits) for _ in range(2) if rng.random() < habits.deeds]
    rng.shuffle(before)
    action = "step" if habits.in_backward else rng.choice(("step",) * 6 + ("skip", "carry", "step twice"))
    return Step(
        freezes=freezes if rng.random() < habits.freezes else None,
        failure=failure if rng.random() < habits.failures else None,
        mode=rng.choice(modes) if habits.most_passes > 1 else "apart",
        passes=tuple(draw_pass(rng, f"{key}-{number}", world, shape, habits) for number in range(count)),
        before=tuple(before),
        action=action,
        zero=rng.choice(("to None", "to None", "to zero", "model", "nothing")),
        after=tuple(draw_deed_after(rng, action) for _ in range(2) if rng.random() < habits.deeds),
        looks=rng.random() < 0.4,
    )


def draw_pass(rng, key, world, shape, habits):
    return Pass(
        ways=tuple(draw_way(key, rank, shape, habits.order) for rank in range(world)),
        evaluates=not habits.in_backward and rng.random() < habits.deeds / 2,
        quiet=rng.random() < 0.7,
    )


def draw_way(key, rank, shape, order):
    rng = random.Random(f"{key}-{'all' if order == 'same' else rank}-order")
    calls = list(range(len(shape.kinds)))
    if order == "shuffled":
        rng.shuffle(calls)
    elif order == "reversed":
        calls = rng.choice((calls, calls[::-1]))
    elif order == "depth":
        calls = calls[: rng.randint(0, len(calls))]
    elif order == "repeats":
        calls = [rng.choice(calls) for _ in range(rng.randint(1, len(calls) + 2))]
    picks = random.Random(f"{key}-{rank}-experts")
    return Way(
        order=tuple(calls),
        experts=tuple(tuple(sorted(picks.sample(range(shape.experts), picks.randint(0, 2)))) for _ in calls),
        fails_at=rng.randrange(max(1, len(calls))),
    )


def draw_edit(rng):
    """Of gradients, as the loop finds them between backward and step."""
    share = rng.random()
    return rng.choice(
        (
            Deed(name="read gradients"),
            Deed(name="scale gradients in place", share=share),
            Deed(name="assign scaled gradients", share=share),
            Deed(name="assign gradients", share=share),
            Deed(name="drop gradients", share=share),
            Deed(name="zero gradients in place", share=0.5),
            Deed(name="add to gradients through data", share=0.5),
            Deed(name="clip with torch", value=rng.choice((0.01, 10.0))),
            Deed(name="clip with the optimizer", value=rng.choice((0.01, 10.0))),
            Deed(name="zero_grad", value=rng.choice((0, 1))),
            Deed(name="zero_grad of the model"),
        )
    )


def draw_deed_before(rng, habits):
    """With ``update_in_backward`` the update has happened by now: what reads or writes values would find others."""
    deeds = [Deed(name="evaluate")]
    if not habits.in_backward:
        deeds += [
            Deed(name="set the rate", value=rng.choice(RATES)),
            Deed(name="write values", share=rng.random() / 2),
            Deed(name="state_dict"),
            Deed(name="state_dict of the optimizer"),
            Deed(name="read values"),
        ]
    return rng.choice(deeds)


def draw_deed_after(rng, action):
    """A model whose gradients wait for the next step is not moved: that is refused."""
    share = rng.random() / 2
    moves = () if action == "carry" else (Deed(name="move"),)
    return rng.choice(
        (
            *moves,
            Deed(name="set the rate", value=rng.choice(RATES)),
            Deed(name="evaluate"),
            Deed(name="load its state_dict"),
            Deed(name="load the optimizer's state_dict"),
            Deed(name="save and load"),
            Deed(name="write lent values", share=share),
            Deed(name="write values", share=share),
            Deed(name="write trained values", share=share),
        )
    )
