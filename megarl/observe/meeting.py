"""Where ranks leave messages for one another outside of collectives: the key-value store of torchrun."""

from __future__ import annotations

import datetime
import json
import os
import uuid

import torch.distributed as dist

_LIMIT = datetime.timedelta(seconds=20)
"""For one answer of the store: it is one process, and 2,048 ranks may ask at once."""


class Meeting:
    """Messages of the ranks of one start of a run. Any thread may use it.

    Every method raises RuntimeError (`torch.distributed.DistError`) where the store is gone.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        """Args:
        store: of these ranks alone, and of nothing else.
        """
        self.rank, self.world_size = rank, world_size
        self._store = store

    @classmethod
    def of_this_run(cls) -> Meeting | None:
        """Opens a connection of its own to torchrun's store; None where there is no torchrun. Collective."""
        if "MASTER_ADDR" not in os.environ:
            return None
        # The store of torchrun outlives a start of the ranks: what an earlier start left must not be read.
        name = [f"megarl-{uuid.uuid4().hex}"]
        dist.broadcast_object_list(name)
        port = int(os.environ["MASTER_PORT"])
        client = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=_LIMIT)
        return cls(dist.PrefixStore(name[0], client), dist.get_rank(), dist.get_world_size())

    def say(self, topic: str, message: str) -> None:
        """Leaves a message under this rank's number, in place of an earlier one on the same topic."""
        self._store.set(_key(topic, self.rank), message)

    def heard(self, topic: str, rank: int) -> str | None:
        """What a rank has left on a topic."""
        key = _key(topic, rank)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def say_first(self, topic: str, message: str) -> tuple[int, str]:
        """Leaves a message that only one rank can leave; returns who was first, and what it left."""
        said = self._store.compare_set(topic, "", json.dumps([self.rank, message]))
        rank, message = json.loads(said.decode())
        return rank, message

    def heard_first(self, topic: str) -> tuple[int, str] | None:
        """What `say_first` has left, and who it was."""
        if not self._store.check([topic]):
            return None
        rank, message = json.loads(self._store.get(topic).decode())
        return rank, message


def _key(topic: str, rank: int) -> str:
    return f"{topic}/{rank}"
