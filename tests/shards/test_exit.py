"""The end of the interpreter in a process that has trained with other ranks: no abort, whatever is still there."""

import contextlib
import subprocess
import sys

import pytest

LIMIT_S = 280
SCRIPT = """
import os, sys, torch, torch.distributed as dist, unwall

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
unwall.shard(model, unwall.Plan(compute_dtype=torch.float32))
optimizer = unwall.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
abandoned = model(torch.randn(2, 8))
dist.destroy_process_group()
"""


def test_a_model_that_is_alive_at_the_end(tmp_path):
    """With the groups destroyed, as torch asks for: without, torch alone aborts now and then."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors


LOOK = """
import atexit, weakref

kept = []
atexit.register(lambda: print(ranks._group, [group() for group in kept]))  # registered first, so it runs last
"""


def test_nothing_here_keeps_a_group_at_the_end(tmp_path):
    """Not even a model that is still alive."""
    look = "ranks = unwall.api.engine(model).ranks\nkept.append(weakref.ref(ranks.control.group))\n"
    code = LOOK + SCRIPT.replace("dist.destroy", look + "dist.destroy")
    processes = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=LIMIT_S)
        assert output.strip() == "None [None]"


LEAVE = """
import pathlib, threading, time

heard = pathlib.Path(sys.argv[1], "heard")


def stay():
    while not heard.exists():
        time.sleep(0.01)


if dist.get_rank() == 1:
    threading.Thread(target=stay).start()
    sys.exit(0)
try:
    for _ in range(2):
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
except unwall.DivergedError as error:
    print(error)
finally:
    heard.touch()
"""


@pytest.mark.drill
def test_a_rank_that_leaves_its_script_while_its_process_stays(tmp_path):
    """Without an exception of which anybody could be told, and with its connections open."""
    code = SCRIPT.replace("abandoned = model(torch.randn(2, 8))\n", LEAVE)
    with contextlib.ExitStack() as both:
        ranks = [
            both.enter_context(
                subprocess.Popen([sys.executable, "-c", code, tmp_path, str(rank)], stdout=subprocess.PIPE, text=True)
            )
            for rank in range(2)
        ]
        both.callback(lambda: [process.kill() for process in ranks])
        told, _ = ranks[0].communicate(timeout=LIMIT_S)
        ranks[1].communicate(timeout=LIMIT_S)
    assert "rank 1 has come to the end of its script (process " in told
