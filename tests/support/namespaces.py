"""Two machines, as far as the network goes: namespaces of this one, with a cable between them. They need root."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
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


def _speak(names: list[str]) -> None:
    """CalledProcessError where nothing gets through the cable: a firewall may see to that."""
    hear = "import socket; s = socket.create_server(('10.231.7.1', 7000)); print(flush=True); s.settimeout(60); s.accept()"
    call = "import socket; socket.create_connection(('10.231.7.1', 7000), 60)"
    with subprocess.Popen(["ip", "netns", "exec", names[0], sys.executable, "-c", hear], stdout=subprocess.PIPE) as listener:
        try:
            assert listener.stdout is not None
            listener.stdout.readline()
            ip("netns", "exec", names[1], sys.executable, "-c", call)
        finally:
            listener.kill()


@contextlib.contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Names of two namespaces with a cable between them; node ``n`` has the address 10.231.7.n+1 at its end, ``cable``.

    The names are new each time, as a killed test may have left its own. The addresses are seen inside alone."""
    absent = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if os.geteuid() != 0 or absent:
        pytest.skip(f"network namespaces need root, {', '.join(absent) or 'and this is another user'}")
    mine = secrets.token_hex(4)
    names, ends = [f"uw{mine}n{number}" for number in range(2)], [f"v{mine}n{number}" for number in range(2)]
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
            for name in names:  # as the tests do: some containers may make namespaces, but not enter them
                ip("netns", "exec", name, "unshare", "--uts", "hostname", "probe")
            _speak(names)
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
