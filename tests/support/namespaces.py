"""Two machines, as far as the network goes: namespaces of this one, with a cable between them. They need root."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def ip(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def _without_dns(folder: Path) -> None:
    """Names are looked up in a file alone: there is no server to ask, and each question would take half a minute."""
    folder.mkdir(parents=True)
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.231.7.1 node0\n10.231.7.2 node1\n")


@contextlib.contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Names of two namespaces with a cable between them; node ``n`` has the address 10.231.7.n+1 at its end, ``cable``."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"uw{os.getpid()}n{number}" for number in range(2)]
    ends = [f"v{os.getpid()}n{number}"[-15:] for number in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                _without_dns(Path("/etc/netns") / name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for number, (name, end) in enumerate(zip(names, ends, strict=True)):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "link", "set", end, "name", "cable")
                ip("-n", name, "addr", "add", f"10.231.7.{number + 1}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
