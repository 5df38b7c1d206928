"""``--nproc``: how the processes of a run meet."""

import json
import sys

from unwall.train import launch

RANK = """
import json, os, pathlib, socket
from unwall.train.launch import LISTENER
from unwall.train.world import join_world

taken = False
try:
    socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
except OSError:
    taken = True
ranks = join_world()
said = [ranks.rank, ranks.size, taken, ranks.every(ranks.rank + 10), LISTENER in os.environ]
pathlib.Path(__file__).with_name(f"said-{ranks.rank}.json").write_text(json.dumps(said))
ranks.every(None)
os._exit(0)  # without an orderly end, at which torch aborts now and then
"""


def test_the_port_of_a_run_is_taken_before_its_ranks_listen(tmp_path, monkeypatch):
    script, python = tmp_path / "rank.py", tmp_path / "python"
    script.write_text(RANK)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(python))
    assert launch.launch(2, []) == 0
    for rank in range(2):
        assert json.loads((tmp_path / f"said-{rank}.json").read_text()) == [rank, 2, True, [10, 11], False]


def test_a_process_that_was_killed_is_named(tmp_path, monkeypatch, capfd):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntest "$RANK" = 1 && kill -KILL $$\nexit 0\n')
    python.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(python))
    assert launch.launch(2, []) == 128 + 9
    said = "unwall: rank 1 was ended by SIGKILL, as the kernel does when memory runs out"
    assert capfd.readouterr().err.startswith(said)
