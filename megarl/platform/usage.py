"""What the device is doing and has used: questions that only measuring asks."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.platform.device import current

# Linux counts the high water in KiB, macOS in bytes (getrusage(2) of each).
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024

_MOST_ALLOCATIONS = 100_000
"""That a snapshot goes back: some steps, and less than 100 MB of host memory."""


def synchronize() -> None:
    """Waits until the device has done everything that was launched; a CPU always has."""
    if not current().is_cpu:
        torch.cuda.synchronize()


def has_work_left() -> bool:
    """Whether the device has not done yet what was launched on its default stream; never on a CPU. Does not wait."""
    return not current().is_cpu and not torch.cuda.default_stream().query()


def peak_memory_bytes() -> int:
    """The most memory that this process has held at once: of tensors on the GPU, or of everything on a CPU.

    On a GPU this is what torch allocated, without its cache and the CUDA context. On a CPU it is the resident set of
    this process; its worker processes are not in it.
    """
    if current().is_cpu:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
    return torch.cuda.max_memory_allocated()


def allocated_bytes() -> int | None:
    """What tensors hold on the GPU now; None on a CPU, where nobody counts it."""
    return None if current().is_cpu else torch.cuda.memory_allocated()


def describe_memory() -> str:
    """How full the device's memory is, in words."""
    if current().is_cpu:
        return f"the process has held {_gib(peak_memory_bytes())} at most"
    free, total = torch.cuda.mem_get_info()
    return (
        f"tensors hold {_gib(torch.cuda.memory_allocated())}, torch has reserved {_gib(torch.cuda.memory_reserved())}, "
        f"and {_gib(free)} of the device's {_gib(total)} are free"
    )


def record_allocations() -> None:
    """From now on CUDA allocations are remembered with their stacks, for `write_memory_snapshot`."""
    if not current().is_cpu:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)


def write_memory_snapshot(file: Path) -> bool:
    """Writes what lies where in GPU memory, for pytorch.org/memory_viz; returns whether there is a GPU.

    Raises:
        OSError: the file cannot be written.
    """
    if current().is_cpu:
        return False
    torch.cuda.memory._dump_snapshot(str(file))
    return True


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range of this name in traces of torch's profiler, and on a GPU in those of Nsight Systems (NVTX)."""
    with torch.profiler.record_function(name):
        if current().is_cpu:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def profiler_activities() -> list[torch.profiler.ProfilerActivity]:
    """What there is to trace here."""
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU] if current().is_cpu else [activity.CPU, activity.CUDA]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
