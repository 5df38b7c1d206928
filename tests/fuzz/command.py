"""The command line that all of these tools share: which seeds, how long, and what is said of each that fails."""

import argparse
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fuzz import pools

LIMIT_S = 120.0
"""For one call of a rank pool: what takes longer hangs."""
RAISED = re.compile(r"\[rank \d+\]|[\w.]*(Error|Exception|Interrupt|Tick)\b|the process died")


class Refused(Exception):
    """The case was refused, as it may be: counted, and no defect."""


class Log:
    """What was done, line by line: read when a seed has failed, also where the process hangs or dies."""

    def __init__(self, folder, name="log"):
        self._path = Path(folder) / f"{name}.log"

    def __call__(self, *words):
        with self._path.open("a") as file:
            print(*words, file=file)


def parse(name, ranks):
    """The options. ``ranks``: how many unless told; None where a seed itself draws how many."""
    parser = argparse.ArgumentParser(prog=f"python -m fuzz.{name}", description=sys.modules["__main__"].__doc__)
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=20, help="how many seeds")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new seed is begun later than this")
    parser.add_argument("--log", action="store_true", help="show what each seed did, and whole tracebacks")
    return parser.parse_args()


def main(name, check, ranks=None):
    """Calls ``check(seed, folder, options)`` for each seed: it gives a list of problems, raises ``Refused``, or raises what is a
    defect. Ends the process with 1 if there was one."""
    options = parse(name, ranks)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tally, end = Counter(), time.monotonic() + 60 * options.minutes
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() > end:
            break
        kind, said = answer(check, seed, options)
        tally[kind] += 1
        if kind == "wrong":
            print(f"seed {seed} is wrong:\n{indented(said)}\n  alone: {alone(name, seed, options)}", flush=True)
        elif options.log:
            print(f"seed {seed}: {kind} {said}", flush=True)
    print(f"fuzz.{name}:", ", ".join(f"{count} {kind}" for kind, count in sorted(tally.items())) or "no seeds", flush=True)
    pools.close()
    sys.exit(1 if tally["wrong"] else 0)


def answer(check, seed, options):
    """Whether the seed is "fine", "refused" or "wrong", and what there is to say about it."""
    with TemporaryDirectory(prefix="unwall-fuzz-") as folder:
        try:
            problems = check(seed, folder, options)
            found = ("wrong", "\n".join(problems)) if problems else ("fine", "")
        except Refused as refusal:
            found = "refused", str(refusal)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            found = "wrong", text if options.log else shortened(text)
        if options.log:
            for path in sorted(Path(folder).glob("*.log")):
                print(f"--- {path.stem}\n{path.read_text()}", flush=True)
    return found


def shortened(text):
    """Of the tracebacks of all ranks, what was raised."""
    return "\n".join(line[:600] for line in text.splitlines() if RAISED.match(line))


def indented(text):
    return "\n".join(f"  {line}" for line in text.splitlines())


def alone(name, seed, options):
    ranks = f" --ranks {options.ranks}" if hasattr(options, "ranks") else ""
    path = os.environ.get("PYTHONPATH", "")
    return f"PYTHONPATH={path} {sys.executable} -m fuzz.{name}{ranks} --first {seed} --count 1 --log"
