"""The states of the random number generators of this process, as a value that tree.py can write."""

import random
import sys
from typing import Any

import torch


def read_generators(device: torch.device) -> dict[str, Any]:
    """Of Python, numpy (where it is in use), torch and, on an accelerator, the device."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if device.type == "cuda":
        found["device"] = torch.cuda.get_rng_state(device)
    return found


def check_generators(found: Any) -> None:
    """Raises for what ``write_generators`` could not take, and changes nothing."""
    random.Random().setstate(found["python"])
    torch.Generator().set_state(found["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in found:
        numpy.random.RandomState().set_state(_of_numpy(found["numpy"]))
    if "device" in found and found["device"].dtype is not torch.uint8:
        raise TypeError(f"the state of a device's generator is bytes, got {found['device'].dtype}")


def write_generators(found: dict[str, Any], device: torch.device) -> None:
    """The inverse."""
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in found:
        numpy.random.set_state(_of_numpy(found["numpy"]))
    if device.type == "cuda" and "device" in found:
        torch.cuda.set_rng_state(found["device"], device)


def _of_numpy(state: Any) -> tuple[Any, ...]:
    name, keys, *rest = state
    return name, keys.numpy().astype("uint32"), *rest
