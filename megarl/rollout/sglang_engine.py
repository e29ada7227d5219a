"""SGLang as an engine of one or several ranks, in processes beside them."""

from __future__ import annotations

import base64
import dataclasses
import os
import socket
from collections.abc import Sequence
from importlib.util import find_spec

import torch.distributed as dist

from megarl import platform
from megarl.config.errors import ConfigError
from megarl.rollout.engine import MEMORY_PARTS, MemoryPart
from megarl.rollout.sglang.channel import Channel
from megarl.rollout.sglang.environment import server_environment
from megarl.rollout.sglang.options import EngineSettings, engine_arguments
from megarl.rollout.sglang.payload import payload_of
from megarl.rollout.sglang.placement import Placement, place
from megarl.rollout.sglang.process import EngineProcess
from megarl.rollout.sglang.shared_engine import SharedEngine, group_of
from megarl.weights.bucket import Bucket


class SGLangEngine(SharedEngine):
    """An engine in processes that its first rank of each node starts, on the devices of its ranks."""

    after_death = "no restart is left of rollout.max_engine_restarts"

    def __init__(self, settings: EngineSettings, placement: Placement, group: dist.ProcessGroup | None) -> None:
        """Starts the engine, without weights. Collective over the engine's ranks; takes up to a minute.

        Args:
            group: a gloo group of the engine's ranks; None if there is one rank.

        Raises:
            ConfigError: SGLang is missing, or cannot run with these settings.
        """
        super().__init__(settings, placement, group)
        self._process: EngineProcess | None = None
        self._start()

    @property
    def _channel(self) -> Channel | None:
        return self._process

    # Life

    def restart(self) -> None:
        """Starts the engine anew, without weights and awake. Collective over the engine's ranks.

        Raises:
            ConfigError: it does not start.
        """
        self.close()
        self._settings = dataclasses.replace(self._settings, seed=self._settings.seed + 1)
        self._forget()
        self._start()

    def close(self) -> None:
        """Ends the engine's processes that this rank started."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> None:
        address = self._from_leader(_free_address) if self._placement.nodes > 1 else None
        problem = None
        if self._placement.starts_process:
            self._process = self._start_process(address)
            problem = self._process.wait_until_ready()
        problems = [text for text in self._gather(problem) if text]
        if problems:
            self.close()
            raise ConfigError(f"SGLang did not start: {problems[0]}")

    def _start_process(self, address: str | None) -> EngineProcess:
        on_cpu = platform.current().is_cpu
        arguments = engine_arguments(self._settings, self._placement, on_cpu=on_cpu, address=address)
        cores = sorted(os.sched_getaffinity(0))
        return EngineProcess(arguments, server_environment(os.environ, self._placement, on_cpu=on_cpu, cores=cores))

    @property
    def pid(self) -> int | None:
        """Of the server process, where this rank has started one."""
        return None if self._process is None else self._process.pid

    # Weights

    def _handle(self, bucket: Bucket) -> str:
        return base64.b64encode(payload_of(bucket)).decode()

    def _deliver(self, channel: Channel, bucket: Bucket, handles: list[str], version: str) -> str | None:
        return channel.call("update_weights", payloads=handles, version=version)

    # Memory

    def sleep(self) -> None:
        """See `Engine.sleep`. Collective over the engine's ranks. Gives back weights, KV cache and CUDA graphs.

        What was in them is gone: the engine needs an update of its weights before it generates again.
        """
        self._refuse_if_generating()
        awake = [part for part in MEMORY_PARTS if part not in self._asleep]
        if not awake:
            return
        # SGLang kills its processes if it is asked while its last batch is still being put away.
        self._ask("flush", paused=False)
        self._ask("release", tags=_tags(awake))
        self._asleep = set(MEMORY_PARTS)
        self._weight_version = None

    def wake(self, parts: Sequence[MemoryPart] = MEMORY_PARTS) -> None:
        """See `Engine.wake`. Collective over the engine's ranks. CUDA graphs wake with the KV cache."""
        asleep = [part for part in parts if part in self._asleep]
        if asleep:
            self._ask("resume", tags=_tags(asleep))
            self._asleep.difference_update(asleep)


def make_sglang_engine(settings: EngineSettings, rank: int, size: int) -> SGLangEngine:
    """The engine that this rank is part of: `size` consecutive ranks form one. Collective over the world.

    Raises:
        ConfigError: SGLang is missing or cannot run with these settings, or the size does not fit torchrun's nodes.
    """
    if find_spec("sglang") is None:
        raise ConfigError(
            "rollout.engine is sglang, but SGLang is not installed: pip install -e '.[sglang]' on a machine with "
            "CUDA, or source launch/setup_sglang_cpu.sh on another."
        )
    if platform.current().is_cpu and settings.options.get("ep_size", 1) > 1:
        raise ConfigError(
            f"rollout.sglang.ep_size is {settings.options['ep_size']}, but on a CPU SGLang's mixtures of experts know "
            "tensor parallelism alone: leave it out there."
        )
    try:
        placement = place(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    return SGLangEngine(settings, placement, group_of(placement))


def _tags(parts: Sequence[MemoryPart]) -> list[str]:
    return [*parts, *(["cuda_graph"] if "kv_cache" in parts else [])]


def _free_address() -> str:
    """An address of this node at which the engine's other nodes reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        # Sends nothing: the system only chooses the interface that leads to where torchrun's ranks meet. A host's own
        # name is often that of its loopback interface.
        route.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        host = route.getsockname()[0]
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{host}:{free.getsockname()[1]}"
