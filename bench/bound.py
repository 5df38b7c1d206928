"""The lower bound of a step: each resource's least work over its measured speed, all of them overlapped.

Simple on purpose. What it leaves out (an update that must wait for the norm, activations, collectives, the order of things)
makes it too low, so the percentages do not flatter.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.shapes import SHAPES

SPLIT_UPDATE_BYTES = 26
"""Host memory that AdamW on a split master reads and writes per parameter: gradient 2, bf16 half 4, remainder 4, moments 16.
The planner's SPLIT_UPDATE_TRAFFIC_BYTES; not imported, because the suite's own process needs neither torch nor unwall."""
LEAN_UPDATE_BYTES = 12
"""The same of lean states: gradient 2, bf16 part 4, remainder 2, moments 4."""
STATE_BYTES, LEAN_BYTES, GRAD_BYTES = 14, 7, 2
"""A parameter with its states at their smallest: bf16 2, remainder 2, moments 8, gradient 2; lean: 2, 1, 2, 2. Plans with
transient gradients keep none."""
FETCH_BYTES = 4
"""To the device, per parameter: its bf16 value for forward and again for backward."""
DRAIN_BYTES = 2
"""From the device, per parameter: its bf16 gradient."""

TEXT = f"""\
Lower bound of a step: the longest of *compute* (model FLOPs at the best rate that an engine with everything on the device
reached in the same run), *host update* ({SPLIT_UPDATE_BYTES} bytes per parameter at the measured host memory bandwidth), *link*
({FETCH_BYTES} bytes per parameter to the device, {DRAIN_BYTES} back, both ways at once) and *disk* (of {STATE_BYTES} bytes
per parameter, what did not fit into the host and device memory the engine used: read once and written once per step, both at
once). With lean states it is {LEAN_UPDATE_BYTES} bytes for the update and {LEAN_BYTES} of state; gradients that are not kept
take none. Host update and link count where the optimizer's state is on the host or the disk; `auto` is held against compute
alone. Without a resident engine in the run compute is left out. Results up to commit 92ec309 took the host's bandwidth from
torch's copy and addition alone, which our update exceeds: there percentages of *host update* can be above 100."""


def bound_seconds(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], probe: Mapping[str, float]) -> dict[str, float]:
    """The terms by name, for a finished row of a run. Empty: a speed that it needs was not measured."""
    rate = best_resident_flops(rows)
    shape, world = SHAPES[row["shape"]], row["world"]
    terms = {} if rate is None else {"compute": world * shape.flops(row["batch"], row["seq"]) / rate}
    if row["tier"] not in ("host", "disk"):
        return terms
    if "host_bytes_per_s" not in probe:
        return {}
    options = row["engine"].partition(":")[2].split(",")
    lean = "states=lean" in options
    terms["host update"] = (LEAN_UPDATE_BYTES if lean else SPLIT_UPDATE_BYTES) * shape.params / probe["host_bytes_per_s"]
    if "host_to_device_bytes_per_s" in probe:  # ranks have a link each and 1/N of the states
        fetch = FETCH_BYTES * shape.params / world / probe["host_to_device_bytes_per_s"]
        drain = DRAIN_BYTES * shape.params / world / probe["device_to_host_bytes_per_s"]
        terms["link"] = max(fetch, drain)
    if row["tier"] == "disk":
        if "disk_both_bytes_per_s" not in probe:
            return {}
        held = row["host_peak_bytes"] + world * row.get("device_peak_bytes", 0)
        kept = (LEAN_BYTES if lean else STATE_BYTES) - (GRAD_BYTES if "grads=transient" in options else 0)
        spilled = max(0, kept * shape.params - held)
        terms["disk"] = 2 * spilled / probe["disk_both_bytes_per_s"]
    return terms


def best_resident_flops(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Model FLOPs per second, of all ranks, of the fastest step among the run's resident engines."""
    rates = [
        row["world"] * SHAPES[row["shape"]].flops(row["batch"], row["seq"]) / min(row["times_s"])
        for row in rows
        if row["status"] == "ok" and row["tier"] == "device"
    ]
    return max(rates, default=None)
