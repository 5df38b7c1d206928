"""One rank's file of a checkpoint, from the tiers to the disk; then all ranks together make it a checkpoint."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from unwall.checkpoint.contents import Contents
from unwall.checkpoint.directory import Claimed, remove_old
from unwall.checkpoint.lots import LotReader
from unwall.checkpoint.manifest import Manifest, dumps, merged
from unwall.checkpoint.meeting import Meeting
from unwall.checkpoint.snapshot import Loans
from unwall.checkpoint.stream import OutStream
from unwall.checkpoint.validation import check_manifest
from unwall.runtime.engine import Engine


def write_file(engine: Engine, contents: Contents, directory: Path, loans: Loans | None) -> Manifest:
    """This rank's file, on the disk. Gives its manifest."""
    stream = OutStream(directory / contents.file, contents.nbytes)
    try:
        stream.append((torch.frombuffer(bytearray(contents.header), dtype=torch.uint8),))
        for number, tensor in enumerate(contents.small):
            stream.append((_bytes(tensor),), number)
        reader = LotReader(engine.tiers)
        with _on_device(engine):
            for lot in contents.lots:
                for span, values in reader.read(lot):
                    stream.append(values, span.piece)
                if loans is not None:
                    loans.end(lot)
        stream.finish()
    finally:
        stream.close()
    return contents.written(stream.crcs)


class Save:
    """A save that is under way on this rank, until ``run`` has ended."""

    def __init__(
        self, engine: Engine, meeting: Meeting, contents: Contents, directory: Path, claimed: Claimed | None, keep: int | None
    ) -> None:
        self.directory = directory
        self._engine = engine
        self._meeting = meeting
        self._contents = contents
        self._claimed = claimed
        self._keep = keep

    def run(self, loans: Loans | None = None) -> None:
        """Raises, on every rank, when any of them could not write; nothing is left of the checkpoint then."""
        error: BaseException | None = None
        written: Manifest | None = None
        try:
            written = write_file(self._engine, self._contents, self.directory, loans)
        except BaseException as failure:
            error = failure
        finally:
            if loans is not None:
                loans.end_all()
        try:
            parts = self._meeting.agree(error, written)
            self._finish(parts)
        except BaseException as failure:
            left = None if self._claimed is None else self._claimed.discard()
            for note in self._meeting.after_failure(left).values():
                if note is not None:
                    failure.add_note(note)
            raise
        # Not before: whatever goes wrong here, or interrupts it, must not cost the new checkpoint when old ones have gone.
        if self._claimed is not None and self._keep is not None:
            with contextlib.suppress(OSError):  # an old one goes the next time
                remove_old(self.directory.parent, self._keep)

    def _finish(self, parts: list[Manifest]) -> None:
        def complete() -> None:
            if self._claimed is not None:
                whole = merged(parts)
                check_manifest(whole, "what was written")
                self._claimed.finish(dumps(whole))

        self._meeting.together(complete)


@contextlib.contextmanager
def _on_device(engine: Engine) -> Iterator[None]:
    """On a stream of its own: what training queues meanwhile does not hold it up."""
    device = engine.device.device
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
