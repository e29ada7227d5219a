"""Memory of a bucket."""

from __future__ import annotations

import mmap
import os

import torch

from megarl import platform


class BucketMemory:
    """Flat memory on the trainer's device, which other processes of the same machine may map.

    On a GPU CUDA lets them map any; on a CPU that which has a `path`. Such memory has no name in a file system, so
    nothing is left behind when the process is killed, and the size of /dev/shm, 64 MB in a container by default, does
    not matter.
    """

    def __init__(self, num_bytes: int, *, mapped: bool) -> None:
        """Args:
        mapped: whether processes of an engine will.
        """
        current = platform.current()
        self._fd: int | None = None
        if not (current.is_cpu and mapped):
            self.data = torch.empty(num_bytes, dtype=torch.uint8, device=current.device)
            return
        self._fd = os.memfd_create("megarl-bucket", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(num_bytes, mmap.PAGESIZE))  # a mapping of no bytes does not exist
        file = torch.from_file(f"/proc/self/fd/{self._fd}", shared=True, size=max(num_bytes, 1), dtype=torch.uint8)
        self.data = file[:num_bytes]
        """[bytes] uint8."""

    @property
    def path(self) -> str | None:
        """What other processes of the same user open, as long as this object lives; None where it is not by a path."""
        return None if self._fd is None else f"/proc/{os.getpid()}/fd/{self._fd}"

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
