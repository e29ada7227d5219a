"""SGLang on GPUs of its own, in a server that `launch/engine.py` starts, as an engine of the ranks that share it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config.errors import ConfigError
from megarl.rollout.engine import MEMORY_PARTS, EngineDied, MemoryPart
from megarl.rollout.sglang.channel import Channel
from megarl.rollout.sglang.facts import engine_facts
from megarl.rollout.sglang.options import EngineSettings
from megarl.rollout.sglang.placement import Placement, place_beside_server
from megarl.rollout.sglang.server_connection import ServerConnection
from megarl.rollout.sglang.shared_engine import SharedEngine, group_of
from megarl.weights.bucket import Bucket


class ServerEngine(SharedEngine):
    """A server that some consecutive ranks share. The first of them talks to it, and sends it all weights."""

    after_death = (
        "start that server again with launch/engine.py, if nothing else does, and then the run, which goes on from its "
        "last checkpoint"
    )

    def __init__(
        self,
        settings: EngineSettings,
        placement: Placement,
        group: dist.ProcessGroup | None,
        *,
        address: str,
        tensor_parallel_size: int,
        limit_s: float,
    ) -> None:
        """Waits for the server. Collective over the ranks that share it.

        Args:
            group: a gloo group of these ranks; None if there is one.
            address: `host:port` of the server.
            tensor_parallel_size: of the server.
            limit_s: seconds that it may take to come, and then for everything but generation.

        Raises:
            ConfigError: on each of these ranks; the server is not there, or does not fit the run.
        """
        super().__init__(settings, placement, group)
        self._tensor_parallel_size = tensor_parallel_size
        self._connection: ServerConnection | None = None
        problem = self._from_leader(lambda: self._connect(address, limit_s))
        if problem is not None:
            raise ConfigError(f"rollout.servers: {problem} (asked by rank {placement.first_rank}).")

    def _connect(self, address: str, limit_s: float) -> str | None:
        facts = engine_facts(self._settings, self._tensor_parallel_size, backend=platform.current().collective_backend)
        try:
            self._connection = ServerConnection(address, facts, limit_s)
        except EngineDied as error:
            return str(error)
        return None

    @property
    def _channel(self) -> Channel | None:
        return self._connection

    def close(self) -> None:
        """Leaves the server, which waits for the next run."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # Weights

    def begin_weight_update(self, version: int) -> None:
        """See `Engine.begin_weight_update`. Collective over the ranks that share the server."""
        self._on_leader(self._form_group)
        super().begin_weight_update(version)

    def _form_group(self, channel: Channel) -> str | None:
        """Makes the group that weights go over, where there is none, or none any more."""
        assert isinstance(channel, ServerConnection)
        if channel.has_group:
            return None
        current = platform.current()
        return channel.form_group(self._tensor_parallel_size, current.collective_backend, torch.device(current.device))

    def _handle(self, bucket: Bucket) -> str:
        return ""  # the first rank's bucket has everything

    def _deliver(self, channel: Channel, bucket: Bucket, handles: list[str], version: str) -> str | None:
        assert isinstance(channel, ServerConnection)
        return channel.send_bucket(bucket, version)

    # Memory

    def sleep(self) -> None:
        """Does nothing: the trainer has no use for the server's memory."""

    def wake(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """Does nothing: the server does not sleep."""


def make_server_engine(
    settings: EngineSettings, rank: int, servers: Sequence[str], *, tensor_parallel_size: int, limit_s: float
) -> ServerEngine:
    """The server of this rank: each has as many consecutive ranks as the others. Collective over the world.

    Args:
        servers: their addresses; as many as divide the world.
        tensor_parallel_size: of each server.
        limit_s: see `ServerEngine`.

    Raises:
        ConfigError: see `ServerEngine`.
    """
    placement = place_beside_server(rank, dist.get_world_size() // len(servers))
    return ServerEngine(
        settings,
        placement,
        group_of(placement),
        address=servers[placement.engine],
        tensor_parallel_size=tensor_parallel_size,
        limit_s=limit_s,
    )
