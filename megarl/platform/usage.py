"""What the device is doing and has used: questions that only measuring asks."""

from __future__ import annotations

import resource
import sys

import torch

from megarl.platform.device import current

# Linux counts the high water in KiB, macOS in bytes (getrusage(2) of each).
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def synchronize() -> None:
    """Waits until the device has done everything that was launched; a CPU always has."""
    if not current().is_cpu:
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """The most memory that this process has held at once: of tensors on the GPU, or of everything on a CPU.

    On a GPU this is what torch allocated, without its cache and the CUDA context. On a CPU it is the resident set of
    this process; its worker processes are not in it.
    """
    if current().is_cpu:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
    return torch.cuda.max_memory_allocated()
