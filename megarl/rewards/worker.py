"""The process that scores. Its arguments: the file descriptors of its socket and its stacks file, and its parent.

It imports nothing heavy and trusts nothing that it runs: whatever a reward function does to this process, the trainer
sees the socket close, or kills it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable

from megarl.processes.parent import die_with_parent
from megarl.rewards.custom import SetupError, is_async, load_function
from megarl.rewards.graders import GRADERS, ScoreFunction
from megarl.rewards.messages import HEADER_BYTES, Job, Ready, Reply, Setup, frame, payload_size, receive, unpack
from megarl.rewards.outcome import Failure, FailureKind, Outcome, read_rewards

CONCURRENT_CALLS = 32
"""Calls of an async function that one worker has running; they usually wait for a server."""

STACK_SIGNAL = signal.SIGUSR2
"""Makes a worker write where it stands into its stacks file, even in the middle of C code. Not SIGUSR1, which a cluster
sends to every process of a job (`processes.stop_signals`)."""

FindFunction = Callable[[str | None], ScoreFunction]


def main() -> None:
    socket_fd, stacks_fd, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    _outlive_sigterm()
    for fd in (socket_fd, stacks_fd):  # a program that a reward function starts must not hold the socket open
        os.set_inheritable(fd, False)
    faulthandler.enable(stacks_fd)
    faulthandler.register(STACK_SIGNAL, stacks_fd)
    connection = socket.socket(fileno=socket_fd)
    setup = receive(connection)
    if setup is None:
        return
    try:
        find = _functions(setup)
    except SetupError as error:
        connection.sendall(frame(Ready(concurrency=0, problem=str(error))))
        return
    if setup.custom_path is not None and is_async(find(None)):
        connection.sendall(frame(Ready(concurrency=CONCURRENT_CALLS)))
        asyncio.run(_serve_async(connection, find, setup.timeout_s))
    else:
        connection.sendall(frame(Ready(concurrency=1)))
        _serve(connection, find)


def _outlive_sigterm() -> None:
    """A cluster sends SIGTERM to every process of a job; the trainer then ends its step, for which it needs rewards.

    What a reward function starts is not changed: a new program has no handlers, and a fork gets the default back, since
    `multiprocessing` ends processes by SIGTERM.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _functions(setup: Setup) -> FindFunction:
    """How to get from the grader of a job to its function."""
    if setup.custom_path is not None:
        custom = load_function(setup.custom_path, setup.custom_name)
        return lambda grader: custom
    find = functools.cache(lambda grader: GRADERS[grader].load())
    for name in setup.graders:
        try:
            find(name)
        except Exception as error:
            raise SetupError(f"the grader {name} cannot be imported: {Failure.of_exception(error).message}.") from error
    return find


def _serve(connection: socket.socket, find: FindFunction) -> None:
    """One job after the other, in the main thread and without an event loop: a function may use signals or
    `asyncio.run` as it likes."""
    while (job := receive(connection)) is not None:
        connection.sendall(frame(Reply(number=job.number, outcome=_score(find(job.grader), job))))


def _score(function: ScoreFunction, job: Job) -> Outcome:
    try:
        return read_rewards(function(**job.arguments))
    except BaseException as error:  # sys.exit in a reward function is a failure of this response, not of the worker
        return Failure.of_exception(error)


async def _serve_async(connection: socket.socket, find: FindFunction, timeout_s: float) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    running = set()

    async def handle(job: Job) -> None:
        outcome = await _score_async(find(job.grader), job, timeout_s)
        writer.write(frame(Reply(number=job.number, outcome=outcome)))

    try:
        while True:
            payload = await reader.readexactly(payload_size(await reader.readexactly(HEADER_BYTES)))
            task = asyncio.create_task(handle(unpack(payload)))
            running.add(task)  # the event loop itself keeps only weak references
            task.add_done_callback(running.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        return


async def _score_async(function: ScoreFunction, job: Job, timeout_s: float) -> Outcome:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            returned = await function(**job.arguments)
        return read_rewards(returned)
    except BaseException as error:
        if limit.expired():  # a TimeoutError of the function's own is an exception like any other
            return Failure(
                kind=FailureKind.TIMEOUT,
                message=f"the reward function took longer than {timeout_s:g} s",
                traceback=Failure.of_exception(error).traceback,
            )
        return Failure.of_exception(error)
