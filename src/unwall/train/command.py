"""``unwall train`` from its options to its end, in the order in which things happen."""

import contextlib
import errno
import functools
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from unwall._version import __version__
from unwall.planner.outline import outline_of
from unwall.planner.probe import Progress as Told
from unwall.planner.read import read_model
from unwall.shards.collectives import Ranks
from unwall.terminal import say
from unwall.train.apart import keeps_apart
from unwall.train.batches import Batches, Packer, my_lanes
from unwall.train.counting import Counting
from unwall.train.data import Data, open_data
from unwall.train.errors import TrainError
from unwall.train.evaluation import Evaluation
from unwall.train.files import find_files, make_index
from unwall.train.folder import RunFolder, finished
from unwall.train.live import LiveLine
from unwall.train.log import Log, check_tensorboard
from unwall.train.loop import Loop, Progress, raise_on_first
from unwall.train.model import Trained, check_length, describe, empty_model, make_model, read_config, set_decay
from unwall.train.options import Options
from unwall.train.order import Order
from unwall.train.planning import Decision, decide, sequences_per_rank
from unwall.train.result import write_result
from unwall.train.saving import AdapterSaver, FullSaver, has_checkpoint
from unwall.train.signals import StopRequests, TerminatedError, ended_by
from unwall.train.start import Start, without_collector
from unwall.train.tokens import Encoder, load_tokenizer
from unwall.train.world import ToldElsewhereError, join_world, leave_world, one_voice, size_of_world, together


def train(options: Options, progress: Told | None = None, imported_s: float = 0.0) -> None:
    """One rank's part of ``unwall train``. ``imported_s``: what the process had taken until then."""
    start = Start(imported_s)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a thread of ours reads the data
    with without_collector():
        _quiet()
    rank, _, _ = size_of_world()
    if finished(options):
        if rank == 0:
            say(f"{options.out} is finished: nothing to do")
        return
    folder = RunFolder(options.out)
    try:
        start.lap("imports")
        asked = _train(options, folder, progress, start)
    except BaseException as error:
        with contextlib.suppress(OSError):
            folder.fail("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    finally:
        folder.release()
    if rank == 0 and asked is None:
        say(f"{options.out} holds {'adapters, for peft' if options.lora else 'the model, for transformers'}")


def _train(options: Options, folder: RunFolder, progress: Told | None, start: Start) -> str | None:
    """Gives the signal that ended it before its last step."""
    rank, ranks, _ = size_of_world()
    decision = None
    with one_voice(), without_collector():
        sequences_per_rank(options, ranks)
        if options.tensorboard:
            check_tensorboard()
        config = read_config(options)
        check_length(options, config, rank)
        tokenizer = load_tokenizer(options.tokenizer_folder, config.get_text_config().vocab_size)
        files, others = find_files(options.data, out=options.out), find_files(options.eval_data, "--eval-data", options.out)
        start.lap("tokenizer")
        if rank == 0:  # before the ranks meet: the machine is measured alone
            changed = folder.claim(options)
            decision = _first_line(options, config, progress, start)
            for said in changed:
                say(f"goes on with {said}")
            start.lap("planning")
            for path in (*files, *others):
                make_index(path, folder.index)
    world = join_world()
    plan = world.broadcast_object(None if decision is None else (decision.plan, decision.passes, decision.bound_s))
    asked = _Run(options, world, folder, config, tokenizer, start, *plan).run(files, others, decision)
    if rank == 0:
        folder.write(status="finished" if asked is None else "interrupted")
    leave_world(world)
    return asked


def _first_line(options: Options, config: Any, progress: Told | None, start: Start) -> Decision:
    """What to expect, printed before anything is loaded."""
    given: Any = empty_model(options, config) if options.lora else Path(options.model)
    outline = outline_of(given, config.model_type) if options.lora else read_model(given)
    found = decide(options, outline, progress, start)
    detailed = options.verbose and found.chosen is not None and found.chosen.prediction is not None
    say(found.chosen if detailed else found.line)  # in detail it begins with the same line
    return found


class _Run:
    """One rank of a run whose plan is known."""

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        folder: RunFolder,
        config: Any,
        tokenizer: Any,
        start: Start,
        plan: Any,
        passes: int,
        bound_s: float | None,
    ) -> None:
        self.options, self.ranks, self.folder, self.config, self.tokenizer = options, ranks, folder, config, tokenizer
        self.start, self.plan, self.passes, self.bound_s = start, plan, passes, bound_s
        self.encoder = Encoder(tokenizer)
        self.alone = not keeps_apart(config)
        if not self.encoder.closes and ranks.rank == 0:
            say("the tokenizer has no token for the end of a text: nothing shows the model where to stop")

    def run(self, files: list[Path], others: list[Path], decision: Decision | None) -> str | None:
        """Gives the signal that ended it before its last step."""
        data = together(self.ranks, lambda: self._open(files, "train"))
        tested = together(self.ranks, lambda: self._open(others, "validation")) if others else None
        together(self.ranks, lambda: self.folder.same_data(data.to_dict()))
        order = data.order(self.options.seed)
        if self.alone and self.ranks.rank == 0:
            kind = self.config.model_type
            say(f"{kind} cannot keep samples apart that share a sequence: each gets one of its own")
        counting = self._counting(data)
        try:
            resumes = any(self.ranks.every(has_checkpoint(self.folder.checkpoints)))
            self.start.lap("data")
            make = functools.partial(make_model, self.options, self.config, self.plan, self.start, resumes=resumes)
            trained = together(self.ranks, make)
            saver = self._saver(trained)
            done = Progress.from_dict(saver.load()) if resumes else Progress()
            if resumes:
                set_decay(trained.optimizer, self.options)
                self.start.lap("checkpoint")
            steps, limit = self._steps(data, order, counting)
        finally:
            if counting is not None:
                counting.close()
        line = LiveLine(steps, silent=self.ranks.rank != 0)
        try:
            if self.folder.began_before and not done.step:
                line.say(f"{self.folder.path} holds no checkpoint of what was done before: begins again with step 1")
            if decision is not None:
                self._write_run(decision, trained, data, max(steps, done.step))
            return self._loop(data, order, tested, trained, saver, done, line, steps, limit)
        finally:
            line.close()

    def _open(self, paths: list[Path], split: str) -> Data:
        found = open_data(paths, self.folder.index, self.encoder, self.options.strict, split, self.options.seq)
        if self.ranks.rank == 0:
            found.look()
        found.broken.clear()
        return found

    def _counting(self, data: Data) -> Counting | None:
        """Where the number of steps follows from the data."""
        if self.options.steps is not None and self.options.epochs is None:
            return None
        key = f"{self.tokenizer.name_or_path}/{len(self.tokenizer)}/{self.tokenizer.chat_template}/{self.options.seq}"
        return Counting(data, self.folder.index, self.ranks, key)

    def _steps(self, data: Data, order: Order, counting: Counting | None) -> tuple[int, int | None]:
        """How many steps there will be, and the position in the order at which the data ends, if anywhere."""
        options = self.options
        if counting is None:
            assert options.steps is not None
            return options.steps, None
        limit = max(1, round((options.epochs or 1.0) * data.size))
        counted = counting.steps(order, options.batch, options.seq, limit, self.alone)
        self.start.lap("counting")
        if not counted:
            raise_on_first(self.ranks, "no sample of the data can be used: all are empty, or hold no answer")
        return (counted if options.steps is None else min(counted, options.steps)), limit

    def _saver(self, trained: Trained) -> FullSaver | AdapterSaver:
        if self.options.lora:
            return AdapterSaver(self.folder.checkpoints, trained, self.options.keep, self.ranks)
        return FullSaver(self.folder.checkpoints, trained, self.options.keep)

    def _write_run(self, decision: Decision, trained: Trained, data: Data, steps: int) -> None:
        import transformers

        versions = {
            "unwall": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__,
            "python": platform.python_version(),
        }  # fmt: skip
        self.folder.begin(
            self.options, steps=steps, ranks=self.ranks.size, model=describe(trained.model, self.config), data=data.to_dict(),
            versions=versions, **decision.to_dict(),
        )  # fmt: skip

    def _loop(
        self, data: Data, order: Order, tested: Data | None, trained: Trained, saver: FullSaver | AdapterSaver, done: Progress,
        line: LiveLine, steps: int, limit: int | None,
    ) -> str | None:  # fmt: skip
        options, ranks, out = self.options, self.ranks, self.folder.path
        if done.step:
            what = "is finished: nothing to do" if done.step >= steps else f"goes on behind step {done.step} of {steps}"
            line.say(f"{out} {what}")
        lanes = my_lanes(options.batch, ranks.rank, ranks.size, done.lanes, limit, self.alone)
        batches = Batches(Packer(data, order, lanes, options.seq, self.encoder.pad))
        board = out / "tensorboard" if options.tensorboard else None
        log = Log(self.folder.log, done.step, board) if ranks.rank == 0 else None
        evaluation = None
        if tested is not None:
            evaluation = Evaluation(tested, options.seq, self.encoder.pad, options.batch, self.passes, ranks, self.alone)
        trace = out / "profile.json" if ranks.rank == 0 else None
        try:
            with StopRequests() as stop:
                loop = Loop(
                    options, ranks, trained, data, order, batches, self.passes, steps, done, saver, line, log, evaluation,
                    self.bound_s, trace, stop, self.start,
                )  # fmt: skip
                asked = loop.run()
                if asked is not None and not loop.progress.step:
                    raise TerminatedError if asked == "SIGTERM" else KeyboardInterrupt  # nothing is done, nothing is saved
                if asked is None:
                    write_result(options, trained, self.tokenizer, ranks)
        finally:
            batches.close()
            if log is not None:
                log.close()
        line.say(_last_words(options, asked, loop.progress, steps))
        return asked


def _last_words(options: Options, asked: str | None, done: Progress, steps: int) -> str:
    samples = "sample was" if done.skipped == 1 else "samples were"
    skipped = f"; {done.skipped} {samples} skipped" if done.skipped else ""
    if asked is not None and not options.save_every:
        return f"{asked}: stopped behind step {done.step} of {steps}; nothing is saved (--save-every 0){skipped}"
    if asked is not None:
        return f"{asked}: step {done.step} of {steps} is saved in {options.out}; the same command goes on from there{skipped}"
    return f"{done.step} step{'s' * (done.step != 1)} done{skipped}"


def _quiet() -> None:
    """transformers talks a lot."""
    try:
        import transformers
    except ImportError:
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module="transformers|peft|torch.utils.checkpoint")


def run(options: Options, progress: Told | None = None, imported_s: float = 0.0) -> int:
    """The command's exit status: 0, or 2 where another rank says what is wrong. What a user can mend is raised."""
    try:
        train(options, progress, imported_s)
    except ToldElsewhereError:
        return 2
    except KeyboardInterrupt as error:
        return ended_by(error)
    except torch.OutOfMemoryError as error:
        said = str(error).partition(". ")[0]
        raise TrainError(
            f"{said}: use more passes (--accumulate), shorter sequences (--seq), or leave activations room (--device-bytes)"
        ) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise TrainError(
            f"{error.filename or options.out}: {error.strerror or error}; make room, or choose another --out. What was saved "
            "before stays, and the same command goes on from there"
        ) from None
    return 0
