"""The exchange of a few words between the ranks of a model, apart from the data: how they agree, and on what.

[Note: waiting]
A wait for other ranks takes place in short pieces, which torch's works allow (``wait(timeout)`` raises and leaves the work as
it is). Between two of them a rank looks whether another one has written that it cannot go on (shards/watch.py). A wait that
is not long costs nothing more than one in one piece.

[Note: frames]
gloo ends the process when two ranks meet in one collective with different sizes, and ranks that have lost each other do just
that. So every exchange begins with a frame of the same size, whatever it is about: its kind, its length, how many faults the
ranks have met after, and as many words as fit. Only where all ranks say the same does more follow, at once. Otherwise every
rank sees in the same exchange that they are apart. A rank that leaves an exchange half way (a second Ctrl-C) cannot know what
the others agreed on in it: it tells them that the ranks cannot go on, and begins no other one.
"""

import atexit
import datetime
import pickle
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from unwall.native import interrupts
from unwall.shards.long_wait import LongWait
from unwall.shards.looking import LOOK_S
from unwall.shards.watch import Watch

TEXT_WORDS = 64
"""For a text that ranks tell each other, 7 bytes in each."""
FRAME_WORDS = 16
"""Of each exchange. See [Note: frames]."""
_HEAD_WORDS = 3


class DivergedError(RuntimeError):
    """The ranks are not at the same point of the training loop, or one of them does not come to it."""


class PeerError(DivergedError):
    """Another rank failed, and raised its own error. What was under way is given up on all ranks; they can go on together."""


class Exchange:
    """The first words of an exchange, on their way. See [Note: frames]."""

    def __init__(self, work: Any, every: torch.Tensor, size: int, words: Sequence[int]) -> None:
        self.work = work
        self.words = words
        """This rank's, all of them."""
        self._every = every
        self._size = size

    def frames(self) -> list[list[int]]:
        """Every rank's frame, once they are there."""
        return self._every.view(self._size, -1).tolist()


class Control:
    """The control group of one model. Every exchange blocks until all ranks have come to it."""

    def __init__(self, group: Any, watch: Watch | None, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.timeout = timeout
        """How long a rank waits for another one: that of the process group."""
        self.exchanges = 0
        """Since the statistics were reset."""
        self.model = 0
        """The model's number, counted alike on every rank of the group."""
        self.bit_words = 0
        """Words that say which parameters of a group have a gradient; the largest group decides."""
        self._watch = watch

    @property
    def watch(self) -> Watch:
        assert self._watch is not None, "a rank alone watches nobody"
        return self._watch

    def begin(self, bit_words: int) -> None:
        """The model is ready. All ranks call it together."""
        self.bit_words = bit_words
        if self.group is not None:
            self.model = _counts[self.group] = self.models_begun + 1
            _live.add(self)

    def let_go(self) -> None:
        """Keeps the process group no longer."""
        self.group = self._watch = None

    @property
    def models_begun(self) -> int:
        """How many models the ranks of this group have shared by now."""
        return 0 if self.group is None else _counts.get(self.group, 0)

    @property
    def only_model(self) -> bool:
        """Whether no other model of this process uses the same ranks."""
        return all(other is self or other.group is not self.group for other in _live)

    # -- words --------------------------------------------------------------------------------------------------------

    def begin_exchange(self, kind: str, words: Sequence[int]) -> Exchange:
        """Sends this rank's words. Not before an exchange that another model of this rank has begun has ended."""
        parting = None if self._watch is None or self._watch.parting is None else self._watch.parting()
        if parting is not None:
            parting()
        self.exchanges += 1
        frame = [zlib.crc32(kind.encode()), len(words), self.watch.faults, *words[: FRAME_WORDS - _HEAD_WORDS]]
        frame += [0] * (FRAME_WORDS - len(frame))
        every = torch.empty(self.size * FRAME_WORDS, dtype=torch.int64)
        return Exchange(self.all_gather(every, torch.tensor(frame, dtype=torch.int64)), every, self.size, words)

    def end_exchange(self, exchange: Exchange, where: str) -> list[list[int]]:
        """Every rank's words, by rank. DivergedError, naming ``where``, when another rank does not answer, or is at an exchange
        of another kind."""
        with self._whole(where):
            self.wait(exchange.work, where)
            frames, words = exchange.frames(), exchange.words
            if any(frame[:_HEAD_WORDS] != frames[0][:_HEAD_WORDS] for frame in frames):
                raise self._apart(where, frames)
            first = [frame[_HEAD_WORDS : _HEAD_WORDS + len(words)] for frame in frames]
            more = words[FRAME_WORDS - _HEAD_WORDS :]
            if not more:
                return first
            rest = torch.empty(self.size * len(more), dtype=torch.int64)
            self.wait(self.all_gather(rest, torch.tensor(more, dtype=torch.int64)), where)
            return [row + others for row, others in zip(first, rest.view(self.size, -1).tolist(), strict=True)]

    def exchange(self, kind: str, words: Sequence[int], where: str) -> list[list[int]]:
        """Every rank's words, by rank: as many on each. See ``end_exchange``."""
        with self._whole(where):
            return self.end_exchange(self.begin_exchange(kind, words), where)

    def tell(self, text: str) -> list[str]:
        """Every rank's text, by rank, cut to what fits."""
        given = text.encode()[: 7 * TEXT_WORDS].ljust(7 * TEXT_WORDS)
        words = [int.from_bytes(given[at : at + 7], "little") for at in range(0, len(given), 7)]
        every = self.exchange("text", words, "an error")
        return [b"".join(word.to_bytes(7, "little") for word in row).decode(errors="ignore").strip() for row in every]

    def every(self, thing: Any, where: str) -> list[Any]:
        """Every rank's object, by rank."""
        mine = pickle.dumps(thing)
        with self._whole(where):
            longest = max(row[0] for row in self.exchange("objects", [len(mine)], where))
            part = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
            whole = torch.empty(self.size * longest, dtype=torch.uint8)
            self.wait(self.all_gather(whole, part), where)
        return [pickle.loads(row.numpy().tobytes()) for row in whole.view(self.size, -1)]

    def from_rank_0(self, thing: Any, where: str) -> Any:
        """Rank 0's object on every rank."""
        given = pickle.dumps(thing) if self.rank == 0 else b""
        with self._whole(where):
            size = self.exchange("rank 0's object", [len(given)], where)[0][0]
            moved = torch.frombuffer(bytearray(given.ljust(size)), dtype=torch.uint8)
            self.wait(self._broadcast(moved), where)
        return pickle.loads(moved.numpy().tobytes())

    def share(self, whole: torch.Tensor, part: torch.Tensor, where: str) -> None:
        """Fills ``whole``, in host memory, with every rank's ``part``."""
        with self._whole(where):
            sizes = [row[0] for row in self.exchange("bytes", [part.nbytes], where)]
            if any(size != part.nbytes for size in sizes):
                raise DivergedError(f"at {where} the ranks have parts of {sizes} bytes: all ranks must do the same here")
            self.wait(self.all_gather(whole, part), where)

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> Any:
        """Every rank's ``part``, in host memory, in flight. Only where all ranks are known to be here."""
        return self.group._allgather_base(whole, part)

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self.group.broadcast([tensor], options)

    @contextmanager
    def _whole(self, where: str) -> Iterator[None]:
        """An exchange is taken part in as a whole: see [Note: frames]. Ctrl-C waits; what is raised nevertheless is told."""
        with interrupts.deferred, self.watch.lock:
            if self.watch.end:
                raise DivergedError(f"rank {self.rank} is at {where}, but the ranks cannot go on: {self.watch.end}")
            try:
                yield
            except DivergedError:
                raise
            except BaseException as error:
                self.watch.tell_end(f"rank {self.rank} left {where} half way: {type(error).__name__}: {error}")
                raise

    def _apart(self, where: str, frames: list[list[int]]) -> DivergedError:
        """The ranks have come to different exchanges, and all of them see it."""
        others = [rank for rank, frame in enumerate(frames) if frame[:_HEAD_WORDS] != frames[self.rank][:_HEAD_WORDS]]
        told = f"; told before: {self.watch.fault}" if self.watch.fault else ""
        error = DivergedError(
            f"rank {self.rank} is at {where} ({self.watch.where()}), and rank {', '.join(map(str, others))} at something else: "
            f"{self.watch.describe_others()}{told}. All ranks must call the same, in the same order. Start them again from a "
            "checkpoint"
        )
        self.watch.tell_end(str(error))
        return error

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, work: Any, where: str, patience_s: float | None = None, *, blocks: bool = True) -> bool:
        """Waits for work in which all ranks take part. See [Note: waiting]. DivergedError when it does not come to its end.

        ``patience_s``: gives up waiting after this time, with False; the work goes on. Without ``blocks`` it is the device that
        waits, and this returns at once."""
        limit = self.timeout.total_seconds() if patience_s is None else patience_s
        until = time.monotonic() + limit
        long: LongWait | None = None
        try:
            if not blocks:
                work.wait()
                return True
            while not finished(work, min(LOOK_S, limit)):
                if self.watch.end:
                    at = f"{where} ({self.watch.where()})"
                    raise DivergedError(f"rank {self.rank} waits at {at}, but the ranks cannot go on: {self.watch.end}")
                if time.monotonic() >= until:
                    if patience_s is not None:
                        return False
                    raise self.unanswered(where, f"within {self.timeout}")
                if patience_s is None:
                    long = long or LongWait(self.watch, self.rank, where)
                    if why := long.look():
                        raise self.unanswered(where, why)
        except DivergedError:
            raise
        except RuntimeError as error:
            raise self.unanswered(where, str(error)) from error
        finally:
            if long is not None:
                long.over()
        return True

    def outwait(self, work: Any, where: str) -> None:
        """Waits on the host for work that the device waits in, where the host would wait for the device in any case. Who waits
        there hears of nothing until the process group is given up, and then torch's watchdog may end the process first."""
        pause_s, ended = 1e-4, False
        while not ended:
            ended = work.is_completed()  # also where it was given up: asked before the reason is, which is said before that
            if self.watch.end:
                at = f"{where} ({self.watch.where()})"
                raise DivergedError(f"rank {self.rank} waits at {at}, but the ranks cannot go on: {self.watch.end}")
            if not ended:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1e-2)

    def unanswered(self, where: str, why: str) -> DivergedError:
        """The error of a wait that was in vain, or of a collective that could not begin."""
        told = self.watch.end or self.watch.fault
        others = self.watch.describe_others() + (f"; told before: {told}" if told else "")
        error = DivergedError(
            f"rank {self.rank} is at {where} ({self.watch.where()}) and another rank did not answer ({why}). {others}. Did it "
            "fail, and do all ranks run the same number of iterations, of training and of evaluation?"
        )
        self.watch.tell_end(str(error))
        return error


def finished(work: Any, seconds: float) -> bool:
    """Waits for torch's work at most that long. Raises what it failed with."""
    try:
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it failed, and says so again, or has just ended
    return True


def all_gather_flat(whole: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
    """torch's all-gather of flat tensors, whatever its name."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return call(whole, part, **options)


def pack_bits(indices: Sequence[int], count: int) -> tuple[int, ...]:
    """Indices below ``count`` as bits of 62-bit words."""
    words = [0] * (-(-count // 62))
    for index in indices:
        words[index // 62] |= 1 << (index % 62)
    return tuple(words)


def unpack_bits(words: Sequence[int]) -> set[int]:
    return {62 * at + bit for at, word in enumerate(words) for bit in range(62) if word >> bit & 1}


_live: "weakref.WeakSet[Control]" = weakref.WeakSet()
_counts: dict[Any, int] = {}
atexit.register(_counts.clear)  # see _let_go_of_groups in shards/collectives.py
