"""The world process group: how ranks find one another and how long they wait."""

from __future__ import annotations

import datetime
import faulthandler
import os

import torch
import torch.distributed as dist

from megarl.platform.device import current

DEFAULT_TIMEOUT_S = 600.0


def init_distributed(timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[int, int]:
    """Joins the world of `torchrun`, or makes a world of one where there is no `torchrun`.

    Returns:
        (rank, world size).
    """
    platform = current()
    # A fatal signal prints the Python stack: the only trace there is when a rank dies inside a collective.
    faulthandler.enable()
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_s)
        device_id = None if platform.is_cpu else torch.device(platform.device)
        if "RANK" in os.environ:
            dist.init_process_group(platform.collective_backend, timeout=timeout, device_id=device_id)
        else:
            store = dist.HashStore()
            dist.init_process_group(
                platform.collective_backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id
            )
    return dist.get_rank(), dist.get_world_size()


def shutdown_distributed() -> None:
    """Leaves the world in good order (NCCL warns, and may hang, when a process just exits)."""
    if dist.is_initialized():
        dist.destroy_process_group()
