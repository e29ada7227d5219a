"""A reward worker as the trainer sees it: started, asked, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from megarl.rewards.custom import SetupError
from megarl.rewards.messages import HEADER_BYTES, Ready, Reply, Setup, frame, payload_size, unpack
from megarl.rewards.outcome import Failure, FailureKind, Outcome
from megarl.rewards.worker import STACK_SIGNAL

logger = logging.getLogger(__name__)

SETUP_LIMIT_S = 120.0
"""How long a worker may take to start: a user's file may import a large library from a slow file system."""

BLOCKED_LOOP_S = 5.0
"""How much longer than its own limit an async function may take to answer before its event loop counts as blocked."""

_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from megarl.rewards.worker import main; main()"
"""The root is appended, so that a checkout that is not installed works. In PYTHONPATH it would come before Python's own
modules, and reach the programs that a reward function starts."""

_GRACE_S = 0.5
_EXIT_S = 2.0
"""For a process whose socket has closed to be gone as well, also on a busy machine."""
_STACKS_S = 0.1
"""For a worker to write the rest of its stacks: it may lose the core in between."""
_END_LIMIT_S = 5.0
_POLL_S = 0.01
_CLOSED = (asyncio.IncompleteReadError, ConnectionError)


class WorkerProcess:
    """One running worker. Belongs to one event loop."""

    def __init__(
        self,
        setup: Setup,
        process: subprocess.Popen[bytes],
        stacks: IO[bytes],
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.died: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        """Done when the worker has ended: what a response that it was scoring then has failed of."""
        self.concurrency = 1
        """Responses it can score at once."""
        self.has_been_used = False
        self._setup = setup
        self._process = process
        self._stacks = stacks
        self._reader, self._writer = connection
        self._waiting: dict[int, asyncio.Future[Outcome | None]] = {}
        self._ending: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, setup: Setup) -> WorkerProcess:
        """Starts a worker and waits until it can score.

        Raises:
            SetupError: it cannot, or takes more than SETUP_LIMIT_S to say so.
        """
        worker = await cls._launch(setup)
        try:
            async with asyncio.timeout(SETUP_LIMIT_S):
                ready: Ready = await worker._receive()
        except TimeoutError:
            await worker.end(FailureKind.TIMEOUT)
            what = setup.custom_path or ", ".join(setup.graders)
            raise SetupError(f"a reward worker did not start within {SETUP_LIMIT_S:g} s ({what}).") from None
        except _CLOSED:
            await worker.end(FailureKind.WORKER_DIED)
            raise SetupError(f"a reward worker could not start: {worker.died.result().message}.") from None
        except asyncio.CancelledError:
            _kill_session(worker.pid)
            raise
        if ready.problem is not None:
            await worker.end(FailureKind.WORKER_DIED)
            raise SetupError(ready.problem)
        worker.concurrency = ready.concurrency
        worker._listening = asyncio.create_task(worker._listen())
        return worker

    @classmethod
    async def _launch(cls, setup: Setup) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115 - `_end` closes it
        inherited = (theirs.fileno(), stacks.fileno())
        with theirs:
            process = subprocess.Popen(
                # -P: a file in the current folder must not replace a module of Python's own.
                [sys.executable, "-P", "-c", _PROGRAM, _ROOT, *map(str, (*inherited, os.getpid()))],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                # A session of its own: it is killed together with whatever a reward function has started, and Ctrl-C
                # in the terminal reaches the trainer only, which then ends it.
                start_new_session=True,
            )
        worker = cls(setup, process, stacks, await asyncio.open_connection(sock=ours))
        worker._writer.write(frame(setup))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a process; `died` is done only a moment after there is none."""
        return self._process.poll() is None

    async def score(self, number: int, job: bytes) -> Outcome | None:
        """Scores one response; None if the worker ended before it answered, whatever it ended of (`died`).

        A response that takes too long ends the worker.

        Args:
            number: of the job, unique among those of this worker.
            job: the job as a frame.
        """
        self.has_been_used = True
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        # Buffered here: a worker that does not read cannot block the trainer.
        self._writer.write(job)
        limit_s = self._setup.timeout_s + (BLOCKED_LOOP_S if self.concurrency > 1 else 0)
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            await self.end(FailureKind.TIMEOUT)
            return None
        finally:
            del self._waiting[number]

    async def end(self, kind: FailureKind) -> None:
        """Kills the worker and all that it has started, and waits for it. Repeated calls wait for the first."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(kind))
        await asyncio.shield(self._ending)

    async def close(self) -> None:
        """Lets an idle worker end by itself, and then makes sure."""
        self._writer.close()
        if not await self._poll(lambda: not self.is_running, _GRACE_S):
            _kill_session(self.pid)
        await self.end(FailureKind.WORKER_DIED)

    async def _listen(self) -> None:
        try:
            while True:
                reply: Reply = await self._receive()
                answer = self._waiting.get(reply.number)
                if answer is not None and not answer.done():
                    answer.set_result(reply.outcome)
        except (*_CLOSED, pickle.UnpicklingError):  # a function that writes into this socket has broken its worker
            await self.end(FailureKind.WORKER_DIED)

    async def _receive(self) -> Any:
        header = await self._reader.readexactly(HEADER_BYTES)
        return unpack(await self._reader.readexactly(payload_size(header)))

    async def _end(self, kind: FailureKind) -> None:
        if kind is FailureKind.TIMEOUT and self._process.poll() is None:
            os.kill(self.pid, STACK_SIGNAL)
            await self._poll(lambda: os.fstat(self._stacks.fileno()).st_size > 0, _GRACE_S)
            await asyncio.sleep(_STACKS_S)
        else:
            # The socket closes a moment before the process is gone; how it went is worth that moment.
            await self._poll(lambda: not self.is_running, _EXIT_S)
        status = self._process.poll()  # before it is killed from here
        _kill_session(self.pid)
        if not await self._poll(lambda: not self.is_running, _END_LIMIT_S):
            logger.warning("The reward worker %d cannot be killed and is left behind.", self.pid)
        self._writer.close()
        self._stacks.seek(0)
        stacks = self._stacks.read().decode(errors="replace")
        self._stacks.close()
        message = {
            FailureKind.TIMEOUT: f"the reward function took longer than {self._setup.timeout_s:g} s",
            FailureKind.WORKER_DIED: f"the reward worker {_describe_status(status)}",
        }[kind]
        self.died.set_result(Failure(kind=kind, message=message, traceback=stacks))
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)

    async def _poll(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        """Waits until `is_done()`, at most that long. A loop, since nothing that blocks may stop the other workers."""
        for _ in range(int(limit_s / _POLL_S)):
            if is_done():
                return True
            await asyncio.sleep(_POLL_S)
        return is_done()


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already (macOS says the second)
        os.killpg(pid, signal.SIGKILL)


def _describe_status(status: int | None) -> str:
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (" (out of memory?)" if -status == signal.SIGKILL else "")
