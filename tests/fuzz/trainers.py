"""Plays a case of ``fuzz.ranks``: sharded in every rank, or with plain PyTorch in one process, which adds up what the ranks do."""

import contextlib
import random

import torch
from ranks import rank_and_world

import unwall
from fuzz import deeds
from fuzz.blocks import VOCABULARY, Tick, build
from fuzz.budgets import plan_of
from unwall import BudgetError, PeerError


class StoppedError(Exception):
    """A budget ran out in a pass, here or on another rank."""

    def __init__(self, number, cause):
        super().__init__(f"step {number}: {type(cause).__name__}: {cause}")
        self.number = number
        self.cause = type(cause).__name__


def tokens_of(case, number, at, rank):
    draw = torch.Generator().manual_seed(100_000 * case.seed + 1000 * number + 10 * at + rank)
    return torch.randint(0, VOCABULARY, (2, 4), generator=draw)


class Trainer:
    """What both kinds share. ``looks`` has the values of all parameters, at the steps where the script looks at them."""

    is_plain = False

    def __init__(self, case, log):
        self.case, self.log = case, log
        self.model = build(case.shape, case.seed)
        self.looks = []

    def run(self):
        for number, step in enumerate(self.case.script):
            self.log(f"step {number}: {step}")
            self.play(number, step)
        self.looks.append(("the end", self.values()))
        return self.looks

    def play(self, number, step):
        if step.freezes is not None:
            self.freeze(*step.freezes)
        if step.failure is not None:
            self.fail(number, step)
        self.backward(number, step)
        self.log("  passes done")
        for at, deed in enumerate(step.before):
            self.do(deed, f"{number}-before-{at}", number)
        self.update(step)
        self.log("  updated")
        for at, deed in enumerate(step.after):
            self.do(deed, f"{number}-after-{at}", number)
        if step.looks:
            self.looks.append((f"step {number}", self.values()))

    def do(self, deed, key, number):
        self.log(f"  {deed}")
        deeds.DEEDS[deed.name](self, deed, deeds.Moment(key=key, step=number))

    def freeze(self, at, trained):
        block = self.model.blocks[at].requires_grad_(trained)
        if not trained:
            for param in block.parameters():
                self.drop(param)

    def backward(self, number, step):
        """All passes of a step."""
        if step.mode in ("forwards first", "joint"):
            losses = [self.loss(number, at, one.ways) for at, one in enumerate(step.passes)]
            for loss in [sum(losses)] if step.mode == "joint" else losses:
                loss.backward()
            return
        for at, one in enumerate(step.passes):
            quiet = step.mode == "quiet" and one.quiet and at < len(step.passes) - 1
            with self.quiet() if quiet else contextlib.nullcontext():
                loss = self.loss(number, at, one.ways)
                if one.evaluates:
                    self.evaluate(number)
                if step.mode == "retained":
                    loss.backward(retain_graph=True)
                    loss = 0.5 * loss
                loss.backward()

    def loss_of(self, tokens, way):
        loss, last, first = self.model(tokens, way)
        if self.case.shape.penalty is not None:
            (slope,) = torch.autograd.grad(last.float().tanh().sum(), first, create_graph=True)
            loss = loss + 0.1 * slope.float().square().mean()
        return loss

    def evaluate(self, number):
        if self.case.shape.penalty is not None:
            return
        rank, _ = rank_and_world()
        self.model.eval()
        with torch.no_grad():
            self.model(tokens_of(self.case, number, 9, rank), self.case.script[number].passes[0].ways[rank])
        self.model.train()

    def update(self, step):
        if step.action in ("step", "step twice"):
            self.step()
            if step.action == "step twice":  # without gradients: it does nothing
                for optimizer in self.optimizers:
                    optimizer.step()
        elif step.action == "skip":
            self.zero_all(to_none=True)
        if step.action != "carry":
            self.zero(step.zero)

    def zero(self, how):
        if how == "model":
            self.zero_model()
        elif how != "nothing":
            self.zero_all(to_none=how == "to None")

    def zero_model(self):
        self.model.zero_grad()

    def zero_all(self, to_none):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def some(self, share, key):
        """Parameters, each with a probability: the same ones in every rank, and with plain PyTorch."""
        rng = random.Random(f"{self.case.seed}-{key}")
        return [param for param in self.model.parameters() if rng.random() < share]

    def drop(self, param):
        param.grad = None

    def optimizers_of(self, make):
        """``make``: an AdamW of parameters. What may be thawed later belongs to an optimizer, too."""
        params = [param for param in self.model.parameters() if param.requires_grad or self.case.freezes]
        options = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.02}
        if self.case.optimizer == "wrapped SGD":
            return [self.wrapped(torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.01))]
        if self.case.optimizer == "wrapped AdamW":
            return [self.wrapped(torch.optim.AdamW(params, **options))]
        parts = [params[::2], params[1::2]] if self.case.optimizer == "two AdamW" else [params]
        return [make(part, **options) for part in parts]


class Sharded(Trainer):
    """``folder``: of this rank; ``saves``: of all ranks. ``speculate``: False for what others are compared with."""

    def __init__(self, case, log, folder, saves, speculate):
        super().__init__(case, log)
        self.saves = saves
        self.plan = plan_of(case, folder)
        log(self.plan)
        unwall.shard(self.model, self.plan)
        options = {"speculate": speculate, "update_in_backward": case.in_backward and speculate is not False}
        self.optimizers = self.optimizers_of(lambda part, **kw: unwall.AdamW(part, max_grad_norm=case.clip, **kw, **options))

    def wrapped(self, optimizer):
        return unwall.wrap(optimizer, max_grad_norm=self.case.clip)

    def values(self):
        with unwall.full_params(self.model):
            return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def quiet(self):
        return unwall.no_sync(self.model)

    def loss(self, number, at, ways):
        rank, _ = rank_and_world()
        return self.loss_of(tokens_of(self.case, number, at, rank), ways[rank])

    def play(self, number, step):
        try:
            super().play(number, step)
        except (BudgetError, PeerError) as error:
            if not self.case.places.is_tight:
                raise
            self.log("  stopped", repr(error))
            raise StoppedError(number, error) from error

    def fail(self, number, step):
        """Attempts the passes until one fails on one rank, and drops what they gave."""
        rank, _ = rank_and_world()
        try:
            for at, one in enumerate(step.passes[: step.failure.number + 1]):
                here = at == step.failure.number and rank == step.failure.rank
                self.model.fails = step.failure.where if here else None
                try:
                    loss = self.loss(number, at, one.ways)
                finally:
                    self.model.fails = None
                loss.backward()
        except (Tick, PeerError) as error:
            if "BudgetError" in str(error):  # another rank stops here, and this one with it
                raise
            self.log("  failed as it should:", repr(error)[:200])
        self.zero_all(to_none=True)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def clip(self, max_norm):
        (optimizer,) = self.optimizers
        optimizer.clip_grad_norm_(max_norm)


class Plain(Trainer):
    """One process adds up the losses of all ranks. Gradients end with a step, as they do when sharded: the update has used them,
    and what is set to zero after that is a gradient of zeros."""

    is_plain = True

    def __init__(self, case, log):
        super().__init__(case, log)
        self.optimizers = self.optimizers_of(torch.optim.AdamW)
        self.used = set()
        """Parameters whose gradients the last step has used."""

    def wrapped(self, optimizer):
        return optimizer

    def values(self):
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def quiet(self):
        return contextlib.nullcontext()

    def loss(self, number, at, ways):
        every = [self.loss_of(tokens_of(self.case, number, at, rank), way) for rank, way in enumerate(ways)]
        return sum(every) / len(every) if self.case.reduce_op == "mean" else sum(every)

    def fail(self, number, step):
        self.zero_all(to_none=True)

    def step(self):
        for optimizer in self.optimizers:
            params = params_of(optimizer)
            if self.case.clip is not None:
                torch.nn.utils.clip_grad_norm_(params, self.case.clip)
            optimizer.step()
        for param in [param for optimizer in self.optimizers for param in params_of(optimizer)]:
            if param.grad is not None:
                self.used.add(param)
                param.grad = None

    def clip(self, max_norm):
        (optimizer,) = self.optimizers
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), max_norm)

    def drop(self, param):
        super().drop(param)
        self.used.discard(param)

    def zero_model(self):
        super().zero_model()
        self.used.clear()

    def zero_all(self, to_none):
        super().zero_all(to_none)
        for param in [param for optimizer in self.optimizers for param in params_of(optimizer)]:
            if to_none:
                self.used.discard(param)
            elif param in self.used and param.grad is None:
                param.grad = torch.zeros_like(param)


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]
