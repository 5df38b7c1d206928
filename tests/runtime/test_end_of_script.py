"""A script that ends while its model is there: nothing is said, whichever tier it is on."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, unwall

plan = unwall.Plan(params=sys.argv[1], optimizer=sys.argv[1], disk=sys.argv[2])
with unwall.init(plan):
    built = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
for model in (unwall.shard(built, plan), unwall.shard(torch.nn.Linear(64, 64), plan)):
    optimizer = unwall.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_script_ends_without_a_word(tier, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tier, tmp_path], capture_output=True, text=True, timeout=280, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_training_after_the_end_of_the_script_is_refused_in_words(tier, tmp_path):
    """A function of ``atexit``: the threads of the process are gone by then."""
    late = "import atexit\natexit.register(lambda: (model(torch.randn(2, 64)).sum().backward(), optimizer.step()))\n"
    command = [sys.executable, "-c", SCRIPT + late, tier, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert "RuntimeError: the script has ended" in done.stderr
    assert list(tmp_path.iterdir()) == []
