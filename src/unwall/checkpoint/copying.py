"""Copies of flat tensors by the calling thread alone.

[Note: plain copies]
torch splits a large copy in host memory between the threads of OpenMP, which spin while they wait for each other. Beside the
threads that read, check and write files there is seldom a free core for them, and the copy takes many times as long as one
thread would.
"""

import ctypes

import torch


def copy_flat(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target`` becomes ``source``: as many elements, both without gaps, on any device. See [Note: plain copies]."""
    if target.device.type != "cpu" or source.device.type != "cpu" or target.dtype != source.dtype:
        with torch.no_grad():
            target.copy_(source)
        return
    if target.numel() != source.numel() or not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError(f"a copy from {tuple(source.shape)} to {tuple(target.shape)}: expected flat tensors of the same size")
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)  # without the interpreter's lock
