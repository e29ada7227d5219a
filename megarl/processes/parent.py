"""Processes that must not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """Lets the kernel kill this process when its parent dies, even in an endless loop or a collective that waits.

    The parent of the kernel is the thread that started this process, not its whole process: that thread must live on.
    Linux only; elsewhere this does nothing.

    Args:
        parent: process id that the parent had when it started this process, if this process was told; without it, a
            parent that died before this call goes unnoticed.
    """
    if sys.platform != "linux":
        return
    if parent is None:
        parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
