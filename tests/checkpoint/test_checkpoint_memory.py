"""Host memory during a save and a load of a model whose states are on disk, far larger than what may be taken."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unwall

MIB = 1 << 20
TRAIN = """
import sys
import torch
import unwall

folder, mode = sys.argv[1], sys.argv[2]


def status(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) << 10


def reset_peak():
    open("/proc/self/clear_refs", "w").write("5")


plan = unwall.Plan(params="disk", grads="disk", optimizer="disk", disk=folder, compute_dtype=torch.bfloat16)
with unwall.init(plan):
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False) for _ in range(22)])
unwall.shard(model, plan)
optimizer = unwall.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.randn(2, 4096)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
steady = status("VmRSS")
reset_peak()
if mode == "save":
    unwall.save(folder + "/saved", model, optimizer)
else:
    unwall.load(folder + "/saved", model, optimizer)
print(steady, status("VmHWM"), 12 * sum(p.numel() for p in model.parameters()))
"""


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_a_model_of_4_gib_takes_little_host_memory(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(unwall.__file__).parent.parent), "CUDA_VISIBLE_DEVICES": ""}
    for mode in ("save", "load"):
        command = [sys.executable, "-c", TRAIN, str(tmp_path), mode]
        steady, peak, states = map(int, subprocess.check_output(command, env=environment, text=True).split())
        assert states > 4096 * MIB
        assert peak - steady < 512 * MIB, f"{mode}: {(peak - steady) / MIB:.0f} MiB above {steady / MIB:.0f} MiB"
        print(f"{mode}: {(peak - steady) / MIB:.0f} MiB above {steady / MIB:.0f} MiB")
    shutil.rmtree(tmp_path / "saved")  # pytest would keep it, and those of the next runs
