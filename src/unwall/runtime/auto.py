"""``Plan(activations="auto")``: measures the first passes, then decides for each block, and again where passes change.

[Note: first passes]
In the first pass nothing is known: blocks are kept for as long as there is room for all that may come ([Note: the first pass]
in activation_room.py), then recomputed, from inputs on the host where those do not fit either. Where that fails for want of
memory, the block that failed runs again ([Note: run again] in block_call.py), and the rest of the pass is recomputed. From then
on the pure decision of schedule/activations.py counts, by what was measured. A pass with another number of tokens is decided
for in proportion when its first block begins; one with more than ever before is measured.

[Note: one decision]
Ranks exchange what they measured at the beginning of passes with certain numbers, the same on every rank, and decide by the
worst of it. In between a rank decides by its own numbers only where its pass differs from what was agreed on. Ranks that
decide differently compute the same values: what differs is when they need their groups, and they negotiate that. Tensor ranks
are another matter: they run every block together, in backward again, so each decision is one of all of them.
"""

import functools
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from unwall.runtime import transforms
from unwall.runtime.activation_room import ActivationRoom
from unwall.runtime.beside import Beside
from unwall.runtime.block_call import BlockCall, caches_in, given_tensors, is_filled, moving
from unwall.runtime.census import Census
from unwall.runtime.counts import ActivationStats
from unwall.runtime.engine import Engine
from unwall.runtime.link_speed import host_bytes_of, link_of
from unwall.runtime.recompute import inside_checkpoint
from unwall.runtime.saved_on_host import SavedOnHost
from unwall.runtime.sequence_tiles import Tiles
from unwall.runtime.try_again import make_room
from unwall.schedule.activations import NO_LINK, Choice, Measured, everywhere, held_bytes, moved_bytes, peak_bytes
from unwall.schedule.observed import Observed, is_met, worst

MEASURED_PASSES = 2
"""The first one also compiles, and chooses algorithms: its seconds say little."""
CHANGED = 1.02
"""A pass with so many times the tokens is another one."""
STEPS = 64
"""Room is counted in so small a part of what was agreed on, so that ranks whose numbers differ a little decide alike."""


class Auto:
    """The blocks of one model: what becomes of their activations, pass by pass. See [Note: first passes].

    ``stays`` says which tensors are no activations. ``mover`` takes what is moved to the host. ``beside`` estimates what is
    not in blocks.
    """

    def __init__(
        self,
        engine: Engine,
        blocks: int,
        room: Callable[[Callable[[], int]], ActivationRoom],
        mover: SavedOnHost,
        stays: Callable[[torch.Tensor], bool],
        beside: Beside,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._saved = engine.forward.saved
        self._device = engine.device.device
        self._count = blocks
        self._comes_and_goes = any(group.fetch_bytes for group in engine.groups)
        """Something could be dropped."""
        self._mover = mover
        self._stays = stays
        self._beside = beside
        self.tiles: Tiles | None = None
        """Where one block alone does not fit, its token-wise modules run in more of them. None: the plan says how many."""
        self.left_alone = False
        """The model checkpoints by itself."""
        self.used: list[Choice] = ["keep"] * blocks
        """What was done in this pass, or in the last one."""
        self.blocks: tuple[Measured, ...] = ()
        """What is known of the blocks of this pass."""
        self.survived = 0
        """Forwards that ran again after an out-of-memory."""
        self._choices: tuple[Choice, ...] = ()
        self._census: Census | None = None
        self._observed: Observed | None = None
        self._passes = self._size = self._held = 0
        self._beside_bytes = self._input_bytes = 0
        self._ratio = 1.0
        self._measure_next = self._recompute_rest = self._plain = False
        self._caches: dict[int, bool] = {}
        self._decided: dict[tuple[float, int, bool], tuple[Choice, ...]] = {}
        self._plainly: tuple[Observed, float, int] | None = None
        """Of the last decision to keep everything, with room to spare: what it was made of, and what that needs."""
        self._make_room = room
        self._room = room(self.held_bytes)

    def measure_anew(self) -> None:
        """The states live elsewhere from now on, or the budget is another one. All ranks do it at the same point."""
        self._passes, self._observed, self._choices = 0, None, ()
        self._plain, self._plainly = False, None
        self._census, self._saved.seen = None, None
        self._decided.clear()
        self._room = self._make_room(self.held_bytes)

    def held_bytes(self) -> int:
        """What the blocks of this pass hold on the device, by our count."""
        return self._held

    def account(self) -> ActivationStats:
        """What became of the blocks' activations in the last pass."""
        if not self.blocks:
            return ActivationStats(survived=self.survived)
        pairs = list(zip(self.blocks, self.used, strict=True))
        return ActivationStats(
            sum(held_bytes(*pair) for pair in pairs),
            moved_bytes(self.blocks, self.used),
            sum(block.kept_bytes for block, choice in pairs if choice in ("recompute", "host")),
            self.survived,
        )

    # -- passes -------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A forward with gradients begins."""
        engine = self._engine()
        if engine is None:
            return
        self._passes += 1
        measured, met = self._census is not None, is_met(self._passes, MEASURED_PASSES)
        if self.left_alone:
            if engine.ranks.size > 1 and met:
                _agreed(engine, None)  # a rank that has come to no checkpoint yet waits there
            return
        fresh = self._close(engine)
        if engine.ranks.size > 1 and met:
            fresh = _agreed(engine, fresh or self._observed)
        for dimension in engine.others.tensor if measured or met else ():
            fresh = worst(dimension.ranks.every(fresh))
        if fresh is not None:
            self._observed = fresh
            self._ratio = 1.0
            self._decided.clear()
        self._size = self._held = self._beside_bytes = self._input_bytes = 0
        self._recompute_rest = False
        self._caches.clear()
        self._room.begin()
        if self._passes <= MEASURED_PASSES or self._observed is None or self._measure_next:
            self._census = Census(self._count, self._device, self._stays)
            self._saved.seen = self._census.seen
            self._measure_next = False
        if self._observed is not None:
            self._decide(self._observed, may_move=True)
            self._place_mover(any(choice in ("move", "host") for choice in self._choices))
        else:
            self._mover.bound(self._room.left_bytes(), host_bytes_of(engine))
            self._place_mover(True)

    def _close(self, engine: Engine) -> Observed | None:
        """What the pass before has shown, if it was measured."""
        census, self._census, self._saved.seen = self._census, None, None
        if census is None:
            return None
        census.forget()
        smaller = self._observed is not None and self._passes > MEASURED_PASSES + 1 and self._size < self._observed.size
        self._measure_next = self._measure_next or smaller
        if smaller or not census.calls or not self._size:
            return None
        blocks = tuple(census.read())
        self._held = 0
        held = sum(held_bytes(*pair) for pair in zip(blocks, self.used, strict=True))
        largest = max(block.kept_bytes for block in blocks)
        beyond, loss = self._room.beyond_bytes(held, peak_bytes(blocks, self.used), largest, self._known(), self._beside_bytes)
        found = Observed(self._size, blocks, beyond, self._room.left_bytes(), NO_LINK, loss)
        if found.needed_bytes(1.0, everywhere("keep", blocks)) > found.room_bytes:
            link = link_of(engine, SavedOnHost.flight_of(found.room_bytes))
            self._mover.bound(found.room_bytes, link.host_bytes)
            found = found._replace(link=link)
        return found

    def _known(self) -> tuple[int, int] | None:
        """What a pass as large as the last one is known to need besides its blocks."""
        before = self._observed
        if before is None:
            return None
        ratio = self._size / before.size
        return int(before.beyond_bytes * ratio), int(before.loss_bytes * ratio)

    def _decide(self, observed: Observed, *, may_move: bool) -> None:
        if self._is_plain_again(observed):
            self._plain = True
            return
        step = max(1, observed.room_bytes // STEPS)
        left = self._least(self._room.left_bytes())
        room = observed.room_bytes if left > observed.room_bytes - step else left // step * step
        key = (round(self._ratio, 2), room, may_move)
        if key not in self._decided:
            self._decided[key] = observed.best(self._ratio, room, observed.link if may_move else NO_LINK)
        self._choices = self._decided[key]
        self.blocks = tuple(observed.scaled(self._ratio))
        needed = observed.needed_bytes(self._ratio, self._choices)
        in_blocks = observed.in_blocks_bytes(self._ratio, self._choices)  # a loss that does not fit is none of the tiles'
        if in_blocks > room and may_move and self.tiles is not None and self.tiles.more():
            self._measure_next = True
        kept = all(choice == "keep" for choice in self._choices)
        self._plain = kept and needed <= 0.9 * room and self._census is None
        self._plainly = (observed, self._ratio, needed) if self._plain and may_move else None

    def _is_plain_again(self, observed: Observed) -> bool:
        """Whether the last decision is that of this pass, too, however much of the card is free."""
        engine, known = self._engine(), self._plainly
        return (
            known is not None
            and known[0] is observed
            and known[1] == self._ratio
            and self._census is None
            and known[2] <= 0.9 * self._room.sure_bytes()
            and engine is not None
            and not engine.others.tensor  # they decide together
        )

    def _place_mover(self, wanted: bool) -> None:
        """Saved tensors go through the mover only where something moves, or may."""
        layers = self._saved.layers
        if wanted and self._mover not in layers:
            layers.append(self._mover)
        elif not wanted and self._mover in layers:
            layers.remove(self._mover)

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, number: int, block: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block's forward."""
        if self.left_alone:
            return block.keep(args, kwargs)
        if not self._size:
            self._begin_blocks(args, kwargs)
        if self._plain or self.left_alone:
            self.used[number] = "keep"
            return block.keep(args, kwargs) if self.left_alone else self.call_kept(block, args, kwargs, number)
        choice = self.used[number] = self._choice(number, args, kwargs)
        run = functools.partial(self._run, choice, block, args, kwargs)
        census = self._census
        kept = 0 if census is None else census.kept_bytes[number]

        filled = self._is_filled(kwargs)

        def free(error: BaseException) -> bool:
            if filled or not block.leaves_nothing(args, kwargs) or not self.free(error):
                return False
            self.used[number] = "recompute"
            if census is not None:
                census.kept_bytes[number] = kept
            return True

        with nullcontext() if census is None else census.counting(number, block.inputs(args, kwargs), lambda: block.taker):
            output = block.survive(run, args, kwargs, free)
        self._count_held(number)
        if census is not None and isinstance(first := output[0] if isinstance(output, tuple) else output, torch.Tensor):
            self._tell_when_reached(first)
        return output

    def call_kept(self, block: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any], number: int | None = None) -> Any:
        """Where all is kept, and without gradients. Of several ranks none runs a block again that may have collectives of the
        user's, but for what they expect in a pass that is measured, or tight."""
        engine = self._engine()
        if engine is None or engine.ranks.size > 1 or not self._comes_and_goes:
            return block.keep(args, kwargs)

        filled = number is not None and self._is_filled(kwargs)

        def free(error: BaseException) -> bool:
            if filled or not self.free(error):
                return False
            if number is not None:
                self.used[number] = "recompute"
                self._plain = False
            return True

        return block.try_kept(args, kwargs, free)

    def _tell_when_reached(self, output: torch.Tensor) -> None:
        """In a pass that is measured: when backward comes to a block."""
        room = self._room
        if output.requires_grad and not transforms.inside():
            output.register_hook(lambda _: room.reached())

    def _begin_blocks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first block of a pass: how large the pass is."""
        self._size = max(1, sum(tensor.nbytes for tensor in given_tensors(args, kwargs)))
        observed = self._observed
        if observed is None:
            if inside_checkpoint():
                self._leave_alone()
            return
        ratio = self._size / observed.size
        if not 1 / CHANGED < ratio / self._ratio < CHANGED:
            self._ratio = ratio
            self._measure_next = ratio > CHANGED
            self._decide(observed, may_move=self._mover in self._saved.layers)
            self._plain = self._plain and ratio <= CHANGED

    def _choice(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        if self._is_filled(kwargs):
            return "keep"  # what is in the cache belongs to the block's input
        if self._recompute_rest:
            return "recompute"
        if self._choices:
            return self._choices[number]
        assert self._census is not None
        given = given_tensors(args, kwargs)
        self._beside_bytes = max(self._beside_bytes, self._beside.nbytes(given))
        self._input_bytes = max(self._input_bytes, given[0].nbytes if given else 0)
        behind, kept = self._count - number - 1, self._census.kept_bytes
        to_keep, to_stay = self._room.first_bytes(kept, self._input_bytes, behind, self._beside_bytes)
        left = self._least(self._room.left_now_bytes() - to_keep) + to_keep
        return "keep" if left >= to_keep else "recompute" if left >= to_stay else "host"

    def _is_filled(self, kwargs: dict[str, Any]) -> bool:
        """Whether a cache had something in it when the pass came to it."""
        found = caches_in(kwargs)
        self._caches |= {id(cache): is_filled(cache) for cache in found if id(cache) not in self._caches}
        return any(self._caches[id(cache)] for cache in found)

    def _least(self, room_bytes: int) -> int:
        """The least of the tensor ranks' room. See [Note: one decision]."""
        engine = self._engine()
        for dimension in engine.others.tensor if engine is not None else ():
            room_bytes = min(dimension.ranks.every(room_bytes))
        return room_bytes

    def _run(self, choice: Choice, block: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with moving(self._mover) if choice in ("move", "host") else nullcontext():
            return (block.keep if choice in ("keep", "move") else block.recompute)(args, kwargs)

    def _count_held(self, number: int) -> None:
        census = self._census
        if census is not None:
            found = Measured(census.kept_bytes[number], census.input_bytes[number], 0.0)
            self._room.sample()
        else:
            found = self.blocks[number]
        self._held += held_bytes(found, self.used[number])

    def free(self, error: BaseException) -> bool:  # noqa: ARG002 (by whom it was met is not asked yet)
        """An out-of-memory in a forward. False where it cannot be helped: the other ranks were told of it already."""
        engine = self._engine()
        if engine is None or engine.others.tensor:  # they run the block together: it cannot run again on this one alone
            return False
        if not make_room(engine):
            return False
        self.survived += 1
        self._recompute_rest = True
        self._room.failed()
        self._decided.clear()
        self._plainly = None
        return True

    def _leave_alone(self) -> None:
        self.left_alone = True
        self._census, self._saved.seen = None, None
        engine = self._engine()
        model = None if engine is None or engine.root is None else engine.root()
        warnings.warn(
            f"{type(model).__name__} checkpoints its blocks already, so Plan(activations='auto') leaves them alone. Without "
            "those checkpoints unwall would recompute only what does not fit; Plan(activations='keep') says nothing",
            stacklevel=2,
        )


def _agreed(engine: Engine, mine: Observed | None) -> Observed | None:
    engine.together("a pass that decides about activations")
    return worst(engine.ranks.every(mine))
