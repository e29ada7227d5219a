"""The program of a server of its own: runs SGLang, and serves one run after the other.

    python -m megarl.rollout.sglang.listener PORT FACTS ARGUMENTS

FACTS are those of `facts.engine_facts`, ARGUMENTS the engine's, both as JSON. `launch/engine.py` starts it.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from megarl.processes.last_words import leave
from megarl.rollout.sglang.channel import STARTED
from megarl.rollout.sglang.facts import difference
from megarl.rollout.sglang.messages import Answer, Hello, decode, encode
from megarl.rollout.sglang.server import Server, problem_of, start_engine
from megarl.rollout.sglang.sockets import as_connection, limit_reads
from megarl.rollout.sglang.update_group import GROUP_NAME

_HELLO_LIMIT_S = 10
_HELLO_BYTES = 2**20
"""More than a greeting has: what anybody else sends to the port is not read."""


class ListeningServer(Server):
    """Answers the rank of a run that has its engines elsewhere: weights come over a process group."""

    calls = Server.calls | {"join_update_group", "update_weights"}

    def __init__(self, engine: Any, connection: Connection) -> None:
        super().__init__(engine, connection)
        self._processes = engine.server_args.tp_size

    async def join_update_group(self, host: str, port: int, first_rank: int, size: int, backend: str) -> str | None:
        """Has all processes join the group that `update_weights` needs; one of before is left.

        Args:
            host: of the group's first rank, where `port` is that of its store.
        """
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        await self._leave_update_group()
        request = InitWeightsUpdateGroupReqInput(
            master_address=host,
            master_port=port,
            rank_offset=first_rank,
            world_size=size,
            group_name=GROUP_NAME,
            backend=backend,
        )
        return problem_of(await self._manager.init_weights_update_group(request, None))

    async def update_weights(self, content: dict[str, Any], version: str) -> str | None:
        """Takes one bucket, whose bytes come over the group.

        Args:
            content: of the bucket (`payload.contents_of`).
        """
        return await self._load_bucket([pickle.dumps(content)] * self._processes, version)

    async def leave(self) -> None:
        """Makes the engine as it was before the run came, whatever that has left open."""
        self.abort()
        await self.go_on()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        await self.end_weight_update()  # which only says so where none is open
        await self._leave_update_group()
        # Its thread has to be done with the socket before the socket's number is another run's.
        self._outgoing.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._sender.join)

    async def _leave_update_group(self) -> None:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=GROUP_NAME)
        await self._manager.destroy_weights_update_group(request, None)


async def serve_runs(engine: Any, port: socket.socket, facts: Mapping[str, Any]) -> None:
    """Serves whoever comes, one after the other, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        connection, who = await loop.run_in_executor(None, next_run, port, facts)
        _say(f"serves {who}")
        server = ListeningServer(engine, connection)
        await server.serve()
        await server.leave()
        connection.close()
        _say(f"{who} has left")


def next_run(port: socket.socket, facts: Mapping[str, Any]) -> tuple[Connection, str]:
    """Waits for a run that this server can serve; says to others why it cannot."""
    while True:
        peer, address = port.accept()
        who = f"{address[0]}:{address[1]}"
        connection = as_connection(peer)
        limit_reads(connection, _HELLO_LIMIT_S)
        try:
            match decode(connection.recv_bytes(_HELLO_BYTES)):
                case [Hello(facts=dict() as of_run)]:
                    problem = difference(of_run, facts)
                case _:
                    raise ValueError("it does not say who it is")
            connection.send_bytes(encode([Answer(number=STARTED, problem=problem)]))
        except BlockingIOError:
            problem = "it is no run: it says nothing, or only a part"
        except (EOFError, OSError, ValueError) as error:
            problem = f"it is no run: {error or 'it closed the connection'}"
        if problem is None:
            limit_reads(connection, None)  # a run may have nothing to say for long
            return connection, who
        _say(f"refused {who}: {problem}")
        connection.close()


def _say(text: str) -> None:
    print(f"engine: {text}", flush=True)


def main(number: int, facts: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Starts the engine and serves until it is told to end."""
    try:
        # Before the engine, which takes minutes: that somebody has the port should show at once.
        port = socket.create_server(("", number)) if arguments["node_rank"] == 0 else None
    except OSError as error:
        leave(1, f"cannot start: port {number} of this machine: {error.strerror}")
    try:
        engine = start_engine(arguments)
    except Exception as error:  # most often an argument that SGLang cannot use
        leave(1, f"cannot start: SGLang: {type(error).__name__}: {error}")

    def end(*_: Any) -> None:
        engine.shutdown()
        os._exit(0)  # a thread that waits for runs would keep the process

    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, end)
    if port is None:
        _say(f"node {arguments['node_rank']} is ready")
        while True:
            signal.pause()
    _say(f"ready on port {number}")
    engine.loop.run_until_complete(serve_runs(engine, port, facts))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
