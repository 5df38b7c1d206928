"""What several tests of the tiers need: all tiers at once, known bytes, small file systems, other processes."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unwall.native.disk import DiskEngine
from unwall.tiers.block import Block, MemoryBlock
from unwall.tiers.device import DeviceTier
from unwall.tiers.disk import DiskTier
from unwall.tiers.host import HostTier
from unwall.tiers.links import Links

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
SLOT = 64 * KIB
SLOTS = 3


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Tiers:
    """A device, a host and a disk tier with links between them, small enough that a few hundred KiB are many chunks."""

    def __init__(self, directory: Path, device: str) -> None:
        self.engine = DiskEngine(threads=4, depth=8, queue_blocks=64, block_bytes=32 * KIB)
        self.device = DeviceTier(torch.device(device))
        self.host = HostTier()
        self.disk = DiskTier([directory], engine=self.engine, growth_bytes=4 * MIB)
        self.links = Links(self.device, self.host, self.disk, ring_slots=SLOTS, ring_slot_bytes=SLOT)

    def allocate(self, tier: str, nbytes: int, label: str = "") -> Block:
        return getattr(self, tier).allocate(nbytes, label)

    def filled(self, tier: str, data: torch.Tensor) -> Block:
        """A block with these bytes."""
        block = self.allocate(tier, data.numel())
        if isinstance(block, MemoryBlock):
            block.data.copy_(data)
            return block
        through = self.filled("host", data)
        self.links.copy(through, block).wait()
        self.host.free(through)
        return block

    def content(self, block: Block) -> torch.Tensor:
        if isinstance(block, MemoryBlock):
            return block.data.cpu().clone()
        through = self.host.allocate(block.nbytes)
        self.links.copy(block, through).wait()
        found = through.data.clone()
        self.host.free(through)
        return found

    def hold_reads(self) -> None:
        """No read ends until ``let_reads_go``."""
        self.engine.throttle("read", 1)

    def let_reads_go(self, after_seconds: float = 0) -> None:
        threading.Timer(after_seconds, self.engine.throttle, ("read", 0)).start()

    def close(self) -> None:
        self.engine.throttle("read", 0)
        self.links.close()
        self.disk.close()
        self.engine.close()


@contextlib.contextmanager
def tmpfs(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A small file system of its own. Skips the test where mounting is refused."""
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "unwall-test", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is refused: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)  # lazy: a failed test may have left files open


def make_read_only(directory: Path) -> None:
    """As soon as the kernel has let go of the files, which may be a moment after they were closed."""
    command, end = ["mount", "-o", "remount,ro", str(directory)], time.monotonic() + 60
    while subprocess.run(command, capture_output=True).returncode and time.monotonic() < end:
        time.sleep(0.01)
    subprocess.run(command, check=True)


class Child:
    """Another Python process that we talk to by lines."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finish(self) -> int:
        """Lets it go on from where it reads its input, and waits for its end."""
        self.process.communicate("go\n")
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
