"""The process group over which weights reach a server of its own: one rank of the trainer, and the server's processes.

Both sides make it with this class, of torch's backends themselves: it has to do with neither side's world.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

GROUP_NAME = "megarl_weights"
"""Under which SGLang's processes keep it."""
SENDER = 0
"""The trainer's rank in the group; the server's processes follow in order of their tensor-parallel rank."""

_FIND_LIMIT_S = 60.0
"""How long a server's process looks for the sender's store, in which it reads how long it may wait for the rest."""
_LIMIT_KEY = "limit"
_POLL_S = 0.0005
_NCCL_SLACK = 3
"""NCCL's own limit over ours: it ends the whole process when it notices that an operation took too long."""


class UpdateGroup:
    """Brings bytes from the sender to all."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, backend: str, device: torch.device, limit_s: float
    ) -> None:
        """Waits for the others. Collective over the group.

        Args:
            store: that all ranks reach.
            backend: `nccl` or `gloo`.
            device: of what is sent, and of what is received.
            limit_s: seconds that this, and each `broadcast`, may take.

        Raises:
            RuntimeError: the others did not come in time.
        """
        self._backend, self._device, self._limit_s = backend, device, limit_s
        self._store = store  # the sender's is the server of all
        limit = timedelta(seconds=limit_s)
        # First, since NCCL waits without an end for a rank that does not come.
        store.set(f"here/{rank}", b"1")
        store.wait([f"here/{other}" for other in range(size)], limit)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit * _NCCL_SLACK
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore(backend, store), rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(dist.PrefixStore(backend, store), rank, size, limit)
        # NCCL connects with the first operation: what keeps it from that should show here.
        self.wait(self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device)))

    def broadcast(self, data: Tensor) -> dist.Work:
        """Starts to send [bytes] uint8 from the sender, or to receive as many. Collective over the group."""
        return self._group.broadcast(data, root=SENDER)

    def wait(self, work: dist.Work) -> None:
        """Waits until a broadcast is done.

        Raises:
            RuntimeError: it failed, or was not done in time; the group is of no use any more.
        """
        deadline = time.monotonic() + self._limit_s
        # Not `work.wait()`: NCCL's has the device wait, which then would do so for ever.
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"nothing came over the {self._backend} group within {self._limit_s:g} s")
            time.sleep(_POLL_S)
        work.wait()

    def receive(self, num_bytes: int) -> Tensor:
        """The bytes that the sender broadcasts, in memory of their own. Collective over the group.

        Raises:
            RuntimeError: they did not come.
        """
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self.wait(self.broadcast(data))
        return data

    def abort(self) -> None:
        """Leaves at once, whatever is on its way."""
        self._group.abort()


def open_store(host: str, limit_s: float) -> dist.TCPStore:
    """The sender's store, on a free port.

    Args:
        host: the sender's address, as the server reaches it.
    """
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
    store.set(_LIMIT_KEY, str(limit_s))
    return store


def join(host: str, port: int, rank: int, size: int, backend: str) -> UpdateGroup:
    """A receiver's group.

    Raises:
        RuntimeError: the sender or another rank is not there.
    """
    find_limit = timedelta(seconds=_FIND_LIMIT_S)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=find_limit)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return UpdateGroup(store, rank, size, backend=backend, device=device, limit_s=float(store.get(_LIMIT_KEY)))
