"""A server of its own, as the rank that talks to it sees it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.server_rules import parse_address
from megarl.rollout.engine import EngineDied
from megarl.rollout.sglang.channel import STARTED, Channel
from megarl.rollout.sglang.messages import Hello
from megarl.rollout.sglang.payload import contents_of
from megarl.rollout.sglang.sockets import as_connection
from megarl.rollout.sglang.update_group import SENDER, UpdateGroup, open_store
from megarl.weights.bucket import Bucket

_RETRY_S = 0.5
_SLACK_S = 30.0
"""How much longer a rank waits than the server, so that the server's own word comes first."""


class ServerConnection(Channel):
    """Talks to a server, and gives it weights."""

    def __init__(self, address: str, facts: Mapping[str, Any], limit_s: float) -> None:
        """Waits until the server is there and has agreed.

        Args:
            facts: of the run (`facts.engine_facts`).
            limit_s: seconds that this may take, and everything that the server is asked afterwards.

        Raises:
            EngineDied: it is not there, or refuses.
        """
        self.name, self._limit_s = f"the server {address}", limit_s
        self._group: UpdateGroup | None = None
        self._left: list[UpdateGroup] = []
        """Groups that were left with something on its way: their destructors would wait for it."""
        peer = self._reach(address)
        self._host = peer.getsockname()[0]
        """Of this rank, as the server reaches it."""
        super().__init__(as_connection(peer), limit_s + _SLACK_S)
        self._send([Hello(facts=facts)])
        problem = self.answer(STARTED, if_silent=": it is still starting, or serves another run")
        if problem is not None:
            self.close()
            raise EngineDied(f"{self.name} does not fit: {problem}")

    def _reach(self, address: str) -> socket.socket:
        deadline = time.monotonic() + self._limit_s
        while True:
            try:
                return socket.create_connection(parse_address(address), timeout=self._limit_s)
            except socket.gaierror as error:
                raise EngineDied(f"{self.name} has a host name that nobody knows ({error.strerror})") from None
            except OSError as error:  # it may still be starting
                if time.monotonic() > deadline:
                    why = error.strerror or error
                    raise EngineDied(f"{self.name} is not there after {self._limit_s:g} s ({why})") from None
            time.sleep(_RETRY_S)

    @property
    def has_group(self) -> bool:
        """Whether weights can be sent."""
        return self._group is not None

    def form_group(self, tensor_parallel_size: int, backend: str, device: torch.device) -> str | None:
        """Makes the group that brings weights to the server's processes; what went wrong, if anything did.

        Args:
            backend: `nccl` or `gloo`.
            device: on which buckets are.

        Raises:
            EngineDied: the server is gone.
        """
        self.drop_group()
        size = tensor_parallel_size + 1
        store = open_store(self._host, self._limit_s)
        call = self.begin_call(
            "join_update_group", host=self._host, port=store.port, first_rank=SENDER + 1, size=size, backend=backend
        )
        formed: list[UpdateGroup | str] = ["it did not form in time"]
        # In a thread: a backend may wait for ever for a server that dies meanwhile, which its answer here tells.
        form = lambda: formed.append(self._form(store, size, backend, device))
        thread = threading.Thread(target=form, daemon=True)
        thread.start()
        problem = self.answer(call)
        if problem is not None:
            return problem
        thread.join(_SLACK_S)
        match formed[-1]:
            case UpdateGroup() as group:
                self._group = group
                return None
            case why:
                return f"the group for weights did not form: {why}"

    def _form(self, store: dist.TCPStore, size: int, backend: str, device: torch.device) -> UpdateGroup | str:
        try:
            return UpdateGroup(store, SENDER, size, backend=backend, device=device, limit_s=self._limit_s)
        except RuntimeError as error:
            return str(error)

    def send_bucket(self, bucket: Bucket, version: str) -> str | None:
        """Sends a bucket to all of the server's processes; what went wrong, if anything did. It was sent when this
        returns, and may be overwritten.

        Raises:
            EngineDied: the server is gone.
        """
        assert self._group is not None, "form_group comes first"
        call = self.begin_call("update_weights", content=contents_of(bucket), version=version)
        work = self._group.broadcast(bucket.data)
        try:
            # The server's word comes first: it knows what happened, where the group would only wait.
            problem = self.answer(call)
        except EngineDied:
            self.drop_group()
            raise
        if problem is None:
            self._group.wait(work)
        else:
            self.drop_group()  # nobody knows what is still on its way in it
        return problem

    def drop_group(self) -> None:
        """Leaves the group; the server does when it is to join another."""
        if self._group is not None:
            self._group.abort()
            self._left.append(self._group)
            self._group = None

    def close(self) -> None:
        """Leaves the server to whom comes next."""
        self.drop_group()
        super().close()

    def _lost(self) -> EngineDied:
        return EngineDied(f"{self.name} closed the connection, or its machine is gone; its own output says why")
