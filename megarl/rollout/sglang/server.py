"""The program of an engine's server process: runs SGLang and does what its rank asks.

    python -m megarl.rollout.sglang.server PARENT FD ARGUMENTS

PARENT is the rank's process, FD the number of an inherited socket, ARGUMENTS the engine's as JSON. It ends
when the socket's other end closes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megarl.processes.parent import die_with_parent
from megarl.rollout.sglang.channel import STARTED
from megarl.rollout.sglang.messages import Abort, Answer, Call, Draw, Drawn, Refused, decode, encode

_IDLE_TIMEOUT_S = 60.0
"""How long the engine may need to notice that its last response is done."""


class Server:
    """Answers one rank."""

    calls: frozenset[str] = frozenset({"begin_weight_update", "end_weight_update", "flush", "pause", "go_on"})
    """The coroutines that `Call` can name."""

    def __init__(self, engine: Any, connection: Connection) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._connection = connection
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._aborts = 0

    # Messages

    async def serve(self) -> None:
        """Runs until the rank closes the connection."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        # Threads: a rank that does not read for a while must not hold up the loop, which feeds the schedulers.
        threading.Thread(target=self._receive, args=(loop, arrived), daemon=True).start()
        self._sender.start()
        while (messages := await arrived.get()) is not None:
            by_prompt: dict[tuple[int, ...], list[Draw]] = {}
            for message in messages:
                match message:
                    case Draw():
                        by_prompt.setdefault(tuple(message.prompt_ids), []).append(message)
                    case Abort():
                        self.abort()
                    case Call():
                        self._start(self._call(message))
            for draws in by_prompt.values():
                self._start(self._draw_all(draws, self._aborts))

    def _receive(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[list[Any] | None]) -> None:
        messages: list[Any] | None = []
        while messages is not None:
            try:
                messages = decode(self._connection.recv_bytes())
            except (EOFError, OSError, ValueError):
                messages = None
            loop.call_soon_threadsafe(arrived.put_nowait, messages)

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send_bytes(encode([message]))
            except OSError:  # the rank is gone, which `_receive` notices too
                return

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps no strong reference
        task.add_done_callback(self._tasks.discard)

    async def _call(self, call: Call) -> None:
        try:
            if call.method not in self.calls:
                raise ValueError(f"{call.method} is nothing that can be asked of this server")
            problem = await getattr(self, call.method)(**call.arguments)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self._outgoing.put(Answer(number=call.number, problem=problem))

    # Generation

    def abort(self) -> None:
        """Ends all responses soon."""
        self._aborts += 1
        self._manager.abort_request(abort_all=True)

    async def _draw_all(self, draws: list[Draw], aborts: int) -> None:
        """Draws the responses to one prompt. Where there are several, its keys and values are computed first: SGLang
        would compute them for each of those that come at once.

        Args:
            aborts: that there were when the responses were asked for.
        """
        if len(draws) > 1 and not self._manager.server_args.disable_radix_cache:
            await self._compute_prompt(draws[0].prompt_ids)
        for draw in draws:
            self._start(self._draw(draw, aborts))

    async def _compute_prompt(self, prompt_ids: list[int]) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(input_ids=prompt_ids, sampling_params={"max_new_tokens": 0})
        with contextlib.suppress(Exception):  # the responses fail of the same, and say so
            await anext(self._manager.generate_request(request, None))

    async def _draw(self, draw: Draw, aborts: int) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        if self._aborts != aborts:  # SGLang was asked to end what it had, and this it had not yet
            self._outgoing.put(_aborted(draw))
            return
        request = GenerateReqInput(
            input_ids=draw.prompt_ids,
            sampling_params=draw.sampling,
            return_logprob=True,
            return_sampling_mask=draw.is_cut,
            return_routed_experts=draw.routed_experts,
        )
        try:
            result = await anext(self._manager.generate_request(request, None))
        except Exception as error:
            # SGLang wraps some of its refusals as HTTP errors, whose text is in `detail`.
            reason = str(getattr(error, "detail", None) or error)
            self._outgoing.put(Refused(key=draw.key, reason=reason))
            return
        self._outgoing.put(_drawn(draw, result))

    # Weights

    async def begin_weight_update(self) -> str | None:
        """Opens an update."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        return problem_of(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def _load_bucket(self, payloads: list[bytes], version: str) -> str | None:
        """Takes one bucket: a payload for each scheduler process, as bytes."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        from megarl.rollout.sglang.payload import LOAD_FORMAT

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format=LOAD_FORMAT,
            flush_cache=False,  # once, at the end
            weight_version=version,
        )
        return problem_of(await self._manager.update_weights_from_tensor(request, None))

    async def end_weight_update(self) -> str | None:
        """Closes an update."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        return problem_of(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    # Pauses

    async def flush(self, paused: bool) -> str | None:
        """Waits until nothing runs, and drops the KV cache's contents; in a pause nothing runs, and much may wait."""
        result = await self._manager.flush_cache(timeout_s=None if paused else _IDLE_TIMEOUT_S)
        return (
            None if result.success else f"the KV cache could not be flushed: {result.message or 'requests still run'}"
        )

    async def pause(self, mode: str) -> None:
        """Holds all responses where they are."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def go_on(self) -> None:
        """Ends a pause."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())


class ColocatedServer(Server):
    """Of ranks that share their devices with the engine: weights are handed over in memory, which goes to and fro."""

    calls = Server.calls | {"update_weights", "release", "resume"}

    async def update_weights(self, payloads: list[str], version: str) -> str | None:
        """Takes one bucket: a payload for each scheduler process (`payload_of`), in base64."""
        return await self._load_bucket([base64.b64decode(payload) for payload in payloads], version)

    async def release(self, tags: list[str]) -> None:
        """Gives memory back. SGLang kills itself if anything still runs, so `flush` comes first."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume(self, tags: list[str]) -> None:
        """Takes memory again."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)


def problem_of(outcome: tuple[bool, str]) -> str | None:
    # SGLang says what went wrong in its return value, and raises nothing.
    success, message = outcome
    return None if success else message


def _aborted(draw: Draw) -> Drawn:
    """A response that was not begun."""
    return Drawn(
        key=draw.key,
        token_ids=[],
        logprobs=[],
        finish_reason="abort",
        weight_versions=[],
        routed_experts=None,
    )


def _drawn(draw: Draw, result: dict[str, Any]) -> Drawn:
    meta = result["meta_info"]
    tokens = list(result["output_ids"])
    if draw.is_cut:
        logprobs = list(meta.get("output_token_sampling_logprobs", ()))
    else:
        logprobs = [logprob for logprob, *_ in meta.get("output_token_logprobs", ())]
    return Drawn(
        key=draw.key,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=meta["finish_reason"]["type"],
        weight_versions=[(span["start"], span["version"]) for span in meta.get("weight_versions", ())],
        routed_experts=meta.get("routed_experts"),
    )


def start_engine(arguments: dict[str, Any]) -> Any:
    """SGLang's engine, with our changes to its schedulers. Whatever keeps it from starting is raised."""
    from sglang.srt.entrypoints.engine import Engine

    from megarl.rollout.sglang.scheduler import run_scheduler_process

    class HookedEngine(Engine):
        run_scheduler_process_func: Callable[..., Any] = staticmethod(run_scheduler_process)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            # Schedulers send token ids straight to this process (scheduler_components/ipc_channels.py:55), so the
            # detokenizer would only cost half a GB and a third of the time to start.
            return [], []

    engine = HookedEngine(**arguments)
    if engine.tokenizer_manager is not None:
        # What has been imported stays; walking over it costs every flush of the cache a second on a CPU.
        engine.loop.run_until_complete(engine.tokenizer_manager.freeze_gc())
    return engine


def main(parent: int, fd: int, arguments: dict[str, Any]) -> None:
    """Starts the engine, says whether that worked, and serves."""
    # No engine outlives its rank, however that ends; SGLang's own processes do the same with this one.
    die_with_parent(parent)
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    try:
        engine = start_engine(arguments)
    except Exception as error:
        connection.send_bytes(encode([Answer(number=STARTED, problem=f"{type(error).__name__}: {error}")]))
        raise
    connection.send_bytes(encode([Answer(number=STARTED, problem=None)]))
    if engine.tokenizer_manager is None:  # a further node of an engine: its first node has the requests
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes()
        return
    engine.loop.run_until_complete(ColocatedServer(engine, connection).serve())
    engine.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
