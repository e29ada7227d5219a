"""The key-value store that the ranks of one start of a run have to themselves."""

from __future__ import annotations

import datetime
import os
import time
import uuid
from collections.abc import Sequence

import torch.distributed as dist

_PAUSE_S = 0.05


class RanksMissingError(RuntimeError):
    """Ranks that torchrun has started did not come to where all meet."""

    def __init__(self, missing: Sequence[int], world_size: int, seconds: float) -> None:
        """Args:
        seconds: for how long they were waited for.
        """
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {world_size}"
        super().__init__(
            f"{names} did not come within {seconds:.0f} s: stuck at the start (a file system, a debugger), or on a "
            "node that does not reach this one"
        )


def has_agent_store() -> bool:
    """Whether torchrun holds the store, which then outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_start(rank: int, world_size: int, timeout: datetime.timedelta) -> dist.Store:
    """torchrun's store under a name that no earlier start has used. Collective.

    After a restart (`--max-restarts`) torchrun's store has the addresses of the ranks that are gone, under the very
    keys that torch reads them from: gloo then connects to closed ports, and fails (torch 2.13; with NCCL the id of the
    old communicator is read). `TORCHELASTIC_RESTART_COUNT` is no name: each node counts its own restarts.

    Raises:
        RanksMissingError: on rank 0; not all ranks came within `timeout`.
        DistStoreError: on the others.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    name = _invite(store, world_size, timeout) if rank == 0 else _join(store, rank)
    return dist.PrefixStore(name, store)


def _join(store: dist.Store, rank: int) -> str:
    # Under a new name of its own: no answer to an earlier start can be taken for the answer to this.
    own = uuid.uuid4().hex
    store.set(_hello(rank), own)
    name = store.get(_reply(own)).decode()
    store.set(_joined_as(name, rank), "")
    store.add(_joined(name), 1)
    return name


def _invite(store: dist.Store, world_size: int, timeout: datetime.timedelta) -> str:
    """Answers every greeting, of an earlier start too, until as many as there are ranks have joined."""
    name = f"megarl-{uuid.uuid4().hex}"
    answered: set[str] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(_joined(name), 0) < world_size - 1:
        if time.monotonic() > deadline:
            missing = [rank for rank in range(1, world_size) if not store.check([_joined_as(name, rank)])]
            raise RanksMissingError(missing, world_size, timeout.total_seconds())
        for rank in range(1, world_size):
            if not store.check([_hello(rank)]):
                continue
            greeting = store.get(_hello(rank)).decode()
            if greeting not in answered:
                store.set(_reply(greeting), name)
                answered.add(greeting)
        time.sleep(_PAUSE_S)
    return name


def _hello(rank: int) -> str:
    return f"megarl/hello/{rank}"


def _reply(greeting: str) -> str:
    return f"megarl/reply/{greeting}"


def _joined(name: str) -> str:
    return f"megarl/joined/{name}"


def _joined_as(name: str, rank: int) -> str:
    return f"{_joined(name)}/{rank}"
