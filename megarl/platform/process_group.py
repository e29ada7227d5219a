"""The world process group: how ranks find one another and how long they wait."""

from __future__ import annotations

import datetime
import faulthandler
import os

import torch
import torch.distributed as dist

from megarl.platform.collectives import mark_collectives
from megarl.platform.device import current
from megarl.platform.rendezvous import has_agent_store, store_of_this_start

DEFAULT_TIMEOUT_S = 600.0

_PEER_IS_GONE = (
    "gloo/transport",  # a connection was closed or reset, or nothing came for as long as a group waits
    "ncclRemoteError",
    "remote process exited",
    "NCCL communicator was aborted",
)
"""What is in the messages of collectives that fail because of another rank."""


def init_distributed(timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[int, int]:
    """Joins the world of `torchrun`, or makes a world of one where there is no `torchrun`.

    Returns:
        (rank, world size).
    """
    platform = current()
    mark_collectives()
    # A fatal signal prints the Python stack: the only trace there is when a rank dies inside a collective.
    faulthandler.enable()
    if not dist.is_initialized():
        timeout = datetime.timedelta(seconds=timeout_s)
        device_id = None if platform.is_cpu else torch.device(platform.device)
        store, place = None, {}
        if "RANK" not in os.environ:
            store, place = dist.HashStore(), {"rank": 0, "world_size": 1}
        elif has_agent_store():
            place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
            store = store_of_this_start(**place, timeout=timeout)
        dist.init_process_group(platform.collective_backend, store=store, **place, timeout=timeout, device_id=device_id)
    return dist.get_rank(), dist.get_world_size()


def shutdown_distributed() -> None:
    """Leaves the world in good order (NCCL warns, and may hang, when a process just exits)."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_peer_failure(error: BaseException | None) -> bool:
    """Whether an error, or what it came of, says no more than that another rank is gone."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_IS_GONE):
            return True
        if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
            return True
        error = error.__cause__ or error.__context__
    return False
