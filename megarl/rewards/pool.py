"""Keeps reward workers running and busy, on a thread of its own, so that they score while the trainer generates."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megarl.rewards.custom import SetupError
from megarl.rewards.messages import Job, Setup, frame
from megarl.rewards.outcome import FailureKind, Outcome
from megarl.rewards.process import WorkerProcess

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 30.0
_IDLE_DEATHS = 5
"""Workers that die one after the other before they were given anything to score: more will not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """A response to score and who waits for it."""

    number: int
    job: bytes
    future: Future[Outcome]


class WorkerPool:
    """Some worker processes that share one queue.

    A worker that dies or is stopped is replaced. If it was scoring one response, that response has failed. If it was
    scoring several (an async function), nobody knows which of them did it: each is scored once more, alone, so that
    only the culprit fails.
    """

    def __init__(self, setup: Setup, num_workers: int) -> None:
        """Starts the workers and waits until all are ready.

        Raises:
            SetupError: one cannot start.
        """
        self._setup = setup
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[_Task] = asyncio.Queue()
        self._workers: list[WorkerProcess] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._pending: set[Future[Outcome]] = set()
        self._numbers = itertools.count()
        self._broken: str | None = None
        # Workers are children of this thread, and the kernel kills them when it ends: it must live as long as they do.
        self._thread = threading.Thread(target=self._loop.run_forever, name="megarl-rewards", daemon=True)
        self._thread.start()
        try:
            self._call(self._start(num_workers))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes of the running workers."""
        return [worker.pid for worker in self._workers]

    def submit(self, grader: str | None, arguments: dict[str, Any]) -> Future[Outcome]:
        """Queues one response. Returns at once; the future is always completed, at the latest by `close`.

        Args:
            grader: a name of `GRADERS`; None for the user's own function.
            arguments: what the function is called with; must be picklable.
        """
        number = next(self._numbers)
        job = frame(Job(number=number, grader=grader, arguments=arguments))
        task = _Task(number=number, job=job, future=Future())
        self._loop.call_soon_threadsafe(self._enqueue, task)
        return task.future

    def close(self) -> None:
        """Ends all workers. Responses that still wait are failed with a RuntimeError. May be called twice."""
        if self._loop.is_closed():
            return
        self._call(self._stop(), timeout=_CLOSE_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Any, timeout: float | None = None) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    async def _start(self, num_workers: int) -> None:
        starts = [WorkerProcess.start(self._setup) for _ in range(num_workers)]
        started = await asyncio.gather(*starts, return_exceptions=True)
        self._workers = [worker for worker in started if isinstance(worker, WorkerProcess)]
        for problem in started:
            if isinstance(problem, BaseException):
                raise problem
        self._keepers = [asyncio.create_task(self._keep(index)) for index in range(num_workers)]

    async def _stop(self) -> None:
        self._break("the reward workers were closed")
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _enqueue(self, task: _Task) -> None:
        if self._broken is not None:
            task.future.set_exception(RuntimeError(self._broken))
            return
        self._pending.add(task.future)
        self._queue.put_nowait(task)

    def _finish(self, task: _Task, outcome: Outcome) -> None:
        if task.future in self._pending:  # not after `_break`
            self._pending.discard(task.future)
            task.future.set_result(outcome)

    def _break(self, reason: str) -> None:
        """Nothing can be scored from here on: whoever waits is told so instead of waiting for ever."""
        self._broken = self._broken or reason
        for future in self._pending:
            future.set_exception(RuntimeError(self._broken))
        self._pending.clear()

    async def _keep(self, index: int) -> None:
        """Uses one worker after the other, for as long as the pool is open."""
        try:
            suspects: list[_Task] = []
            idle_deaths = 0
            while True:
                worker = self._workers[index]
                suspects = await self._use(worker, suspects)
                idle_deaths = 0 if worker.has_been_used else idle_deaths + 1
                if idle_deaths:
                    logger.warning("An idle reward worker was lost: %s.", worker.died.result().message)
                if idle_deaths == _IDLE_DEATHS:
                    raise SetupError(worker.died.result().message)
                self._workers[index] = await WorkerProcess.start(self._setup)
        except SetupError as error:
            self._break(f"reward workers cannot be kept running: {error}")
        except Exception as error:
            self._break(f"the reward workers failed: {type(error).__name__}: {error}")
            raise

    async def _use(self, worker: WorkerProcess, suspects: list[_Task]) -> list[_Task]:
        """Scores with a worker until it dies: first the suspects, one at a time, then what the queue has.

        Returns:
            Those that have to be scored alone by the next worker.
        """
        while suspects and not worker.died.done():
            suspect = suspects.pop(0)
            outcome = await worker.score(suspect.number, suspect.job)
            self._finish(suspect, await worker.died if outcome is None else outcome)
        unanswered: list[_Task] = []
        async with asyncio.TaskGroup() as slots:
            for _ in range(worker.concurrency):
                slots.create_task(self._fill_slot(worker, unanswered))
        if len(unanswered) == 1:
            self._finish(unanswered.pop(), await worker.died)
        return suspects + unanswered

    async def _fill_slot(self, worker: WorkerProcess, unanswered: list[_Task]) -> None:
        """Scores one response after the other until the worker dies."""
        while (task := await self._next_task(worker)) is not None:
            outcome = await worker.score(task.number, task.job)
            if outcome is None:
                unanswered.append(task)
                return
            self._finish(task, outcome)

    async def _next_task(self, worker: WorkerProcess) -> _Task | None:
        """The next task of the queue; None if the worker dies first."""
        task = await self._take_task(worker)
        if task is None or worker.is_running:
            return task
        # It was killed while it was idle, and its closed socket has not been seen yet: this response did not do it.
        self._queue.put_nowait(task)
        await worker.end(FailureKind.WORKER_DIED)
        return None

    async def _take_task(self, worker: WorkerProcess) -> _Task | None:
        """Waits for the queue, or until the end of the worker is known."""
        if not self._queue.empty() and not worker.died.done():
            return self._queue.get_nowait()
        get = asyncio.create_task(self._queue.get())
        either: list[asyncio.Future[Any]] = [get, worker.died]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            get.cancel()
        if not worker.died.done():
            return get.result()
        if get.done() and not get.cancelled():
            self._queue.put_nowait(get.result())
        return None
