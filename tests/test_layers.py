"""A layer imports only layers below it (those earlier in this list)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unwall

LAYERS = [
    "_version",
    "svg",
    "json_files",
    "nn",
    "sparse",
    "native",
    "tiers",
    "plans",
    "shards",
    "schedule",
    "runtime",
    "optim",
    "checkpoint",
    "planner",
    "parallel",
]
TOP = ["api", "cli", "terminal", "demo", "report", "integrations", "train", "__init__", "__main__"]
SAME = {"deepspeed": "plans"}
"""Files that share the layer of another: ``Plan.from_deepspeed`` and what it calls."""
ROOT = Path(unwall.__file__).parent


def layer_of(module: str) -> str:
    name = module.split(".")[1] if "." in module else "__init__"
    return SAME.get(name, name)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "unwall":
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "unwall"}
    return found


def test_layers_import_downward_only():
    wrong = []
    for path in ROOT.rglob("*.py"):
        here = layer_of(".".join(("unwall", *path.relative_to(ROOT).with_suffix("").parts)))
        if here in TOP:
            continue
        assert here in LAYERS, f"{path}: name the layer '{here}' in LAYERS"
        for module in imports_of(path):
            if LAYERS.index(layer_of(module)) > LAYERS.index(here) if layer_of(module) in LAYERS else True:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, wrong


def run(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def test_import_is_light_and_leaves_the_accelerator_alone():
    """Nothing that training does not need is imported."""
    names = run(
        "import sys, torch; before = set(sys.modules); import unwall; "
        "assert not torch.cuda.is_initialized(); print(*sorted(set(sys.modules) - before))"
    ).split()
    heavy = ("unwall.planner", "unwall.cli", "transformers", "torch._dynamo", "torch.distributed.tensor", "triton", "rich")
    heavy += ("accelerate", "lightning", "peft", "unwall.integrations", "unwall.train", "unwall.report.page")
    assert [name for name in names if name.startswith(heavy)] == []


@pytest.mark.clock
def test_import_takes_little_time():
    code = "import time, torch; start = time.perf_counter(); import unwall; print(time.perf_counter() - start)"
    assert float(run(code)) < 1.0
