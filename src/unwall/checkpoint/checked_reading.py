"""Elements of a checkpoint, read and verified at once, right where they belong.

[Note: once]
What is read into its place before it is verified must be undone where a checksum is wrong. That is possible for the states of
an optimizer that has not stepped yet, which all have their first value: most of the bytes of a training that is resumed. So
these are read once, and set back to that value if anything is found on any rank. Everything else is read twice: see
[Note: twice] in reader.py.

Checksums are over runs that end at the blocks of a file (checksums.py). So this goes through the files block by block, and
reads of each block all runs of which anything is wanted.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from unwall.checkpoint.checksums import BLOCK_BYTES
from unwall.checkpoint.copying import copy_flat
from unwall.checkpoint.in_file import Bounce
from unwall.checkpoint.reader import THREADS, CheckpointFiles, FileBytes, Run, Wanted, cut_at_blocks, places, runs_of_blocks
from unwall.native.checksum import crc32, crc32_copy


def read_checked(files: CheckpointFiles, wanted: Iterable[Wanted]) -> None:
    """CheckpointError, naming file and tensor, where a byte is wrong: what is in the targets then is of no use."""
    wanted = list(wanted)
    known = runs_of_blocks({id(one.tensor): one.tensor for one in wanted}.values())
    found: dict[tuple[str, int], list[FileBytes]] = defaultdict(list)
    for one in wanted:
        for place in places(one):
            for part in cut_at_blocks(place):
                found[part.file, part.offset // BLOCK_BYTES].append(part)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="unwall load") as threads:
        jobs = [threads.submit(_read_block, files, key[0], known[key], parts) for key, parts in sorted(found.items())]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            raise


def _read_block(files: CheckpointFiles, file: str, known: Sequence[Run], parts: list[FileBytes]) -> None:
    parts = sorted(parts, key=lambda part: part.offset)
    low, high = parts[0].offset, max(part.end for part in parts)
    runs = [run for run in known if run.offset < high and run.end > low]
    low, high = runs[0].offset, runs[-1].end
    with files.bounce() as bounce:
        shift = files.fetch(file, low, high - low, runs[0].tensor, bounce, past_cache=True) - low
        for run in runs:
            inside = [part for part in parts if part.offset < run.end and part.end > run.offset]
            if inside and _take(run, inside, bounce, shift) != run.crc:
                raise files.damaged(file, run)


def _take(run: Run, parts: list[FileBytes], bounce: Bounce, shift: int) -> int:
    """Copies what is wanted of a run. Gives the checksum of all of it."""
    source, only = bounce.bytes.data_ptr() + shift + run.offset, parts[0]
    if len(parts) == 1 and only.into.numel() == run.nbytes and only.into.device.type == "cpu":
        return crc32_copy(only.into.data_ptr(), source, run.nbytes)
    for part in parts:
        low, high = max(part.offset, run.offset), min(part.end, run.end)
        copy_flat(_bytes(part.into)[low - part.offset : high - part.offset], bounce.bytes[shift + low : shift + high])
    return crc32(source, run.nbytes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
