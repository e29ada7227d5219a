"""Runs a config several times, with a rank that is stopped or fails at a place; all imports are made once.

`python tests/distributed/fault_ranks.py CONFIG FOLDER CASES`, with CASES as JSON: for each name the rank, the step and
the phase, what happens there (`action`), and further `overrides` of the config. Writes FOLDER/NAME/rank-R.txt with what
each rank printed, and FOLDER/statuses.json with the exit statuses (minus the signal, where one ended it).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megarl.config import load_config
from megarl.observe.meeting import Meeting
from megarl.observe.rank_record import RankRecord
from megarl.platform.progress import PROGRESS, Progress
from megarl.trainers.run import run

WORLD_SIZE = 2
AT_ONCE = 5
LIMIT_S = 400.0
"""Of all that run at once."""


def main(config: str, folder: str, cases: str) -> None:
    todo: dict[str, dict[str, Any]] = json.loads(cases)
    names = list(todo)
    statuses: dict[str, list[int]] = {}
    # One for each of the cases that run at once. The next batch meets at them as a run does that is started again.
    stores = [start_store() for _ in range(AT_ONCE)]
    for start in range(0, len(names), AT_ONCE):
        batch = {
            name: start_case(config, Path(folder, name), todo[name], port)
            for name, (_, port) in zip(names[start : start + AT_ONCE], stores, strict=False)
        }
        deadline = time.monotonic() + LIMIT_S
        statuses |= {name: [wait_for(pid, deadline) for pid in pids] for name, pids in batch.items()}
    for process, _ in stores:
        os.kill(process, signal.SIGKILL)
    Path(folder, "statuses.json").write_text(json.dumps(statuses))


def start_case(config: str, folder: Path, case: dict[str, Any], port: int) -> list[int]:
    """The processes of its ranks."""
    folder.mkdir(parents=True)
    return [fork(lambda rank=rank: run_rank(rank, port, config, folder, case)) for rank in range(WORLD_SIZE)]


def start_store() -> tuple[int, int]:
    """A store in a process of its own, as torchrun has it: it survives any rank. Returns the process and its port."""
    reader, writer = os.pipe()

    def serve() -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        os.write(writer, str(store.port).encode())
        os.close(writer)
        signal.pause()

    process = fork(serve)
    os.close(writer)
    return process, int(os.read(reader, 16))


def fork(action: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return pid


def run_rank(rank: int, port: int, config: str, folder: Path, case: dict[str, Any]) -> NoReturn:
    output = os.open(folder / f"rank-{rank}.txt", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if rank == case["rank"]:
        plan_fault(case)
    settings = [f"trainer.default_local_dir={folder / 'out'}", *case.get("overrides", [])]
    status = 1
    try:
        status = run(load_config(config, settings))
    finally:
        os._exit(status)


def plan_fault(case: dict[str, Any]) -> None:
    """Lets something happen to this process at the beginning of a phase, when the others have heard that it began."""
    heard = note_what_the_others_hear()
    in_phase = Progress.in_phase

    @contextmanager
    def with_fault(progress: Progress, phase: str) -> Iterator[None]:
        with in_phase(progress, phase):
            if (progress.step, phase) == (case["step"], case["phase"]):
                wait_until_heard(heard)
                ACTIONS[case["action"]]()
            yield

    Progress.in_phase = with_fault  # type: ignore[method-assign]


def note_what_the_others_hear() -> list[RankRecord]:
    """A list in which the last thing is what this rank last told of itself."""
    say = Meeting.say
    heard: list[RankRecord] = []

    def say_and_note(meeting: Meeting, topic: str, message: str) -> None:
        say(meeting, topic, message)
        if topic == "record":
            heard[:] = [RankRecord.from_json(message)]

    Meeting.say = say_and_note  # type: ignore[method-assign]
    return heard


def wait_until_heard(heard: list[RankRecord]) -> None:
    while not heard or (heard[0].step, heard[0].phase) != (PROGRESS.step, PROGRESS.phase):
        time.sleep(0.01)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def never_end() -> None:
    while True:
        time.sleep(0.1)


def divide() -> None:
    raise ZeroDivisionError("a test divides by zero")


ACTIONS = {"stop": stop, "kill": kill, "never_end": never_end, "divide": divide}


def wait_for(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 99  # it did not end by itself


if __name__ == "__main__":
    main(*sys.argv[1:])
