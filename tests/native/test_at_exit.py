"""The end of the interpreter while native work is under way: the work ends first."""

import subprocess
import sys

SCRIPT = """
import atexit, ctypes

atexit.register(lambda: print(ticket.done(), bytes(there[-1:])))  # registered first, so it runs last
from unwall.native.pool import WorkerPool

SIZE = 1 << 20
pool = WorkerPool(1)
pool.throttle(4 * SIZE)  # half a second for reading and writing
here, there = (ctypes.c_ubyte * SIZE)(*[7] * SIZE), (ctypes.c_ubyte * SIZE)()
ticket = pool.copy(ctypes.addressof(there), ctypes.addressof(here), SIZE, keep=(here, there))
"""


def test_a_copy_in_flight_ends_before_its_memory_goes():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout.split(maxsplit=1) == ["True", "b'\\x07'\n"]
    assert done.stderr == ""
