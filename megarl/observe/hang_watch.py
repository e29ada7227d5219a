"""Finds out who is missing when a collective does not end, without anybody who is in charge.

A thread of each rank leaves the rank's record with the others at each phase and every few seconds. The first that sees
its own rank wait too long asks all; who does not answer is stopped, dead or stuck. It writes the report, and all leave.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from megarl.observe.hang_report import Answer, Hang
from megarl.observe.meeting import Meeting
from megarl.observe.rank_record import RankRecord, record_of_this_process, stacks_of_this_process
from megarl.platform.progress import PROGRESS, Wait
from megarl.platform.usage import has_work_left
from megarl.processes.identity import start_of
from megarl.processes.last_words import leave

EXIT_FAILED = 1

UNKNOWN_REASON = "another rank is gone; what it printed says why, or torchrun does"

_RECORD, _ANSWER, _QUESTION, _REPORT, _FAILURE = "record", "answer", "question", "report", "failure"

_INTERVALS = 20
"""Looks in the time that a rank may wait: then the limit is kept to 5 %."""
_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.2, 5.0
_PAUSE_S = 0.1
"""Between two messages of a rank: phases of a few milliseconds are not worth one each."""
_BUSY_S = 2.0
"""How much longer than the interval a busy thread may take to answer: Python's lock may be held."""
_TURN_S = 1.0
"""For a rank that fails to say why, and leave by itself, before others leave because of it."""


class HangWatch:
    """The thread of one rank, from `start` to `close`."""

    def __init__(self, meeting: Meeting, folder: str | Path, timeout_s: float) -> None:
        """Args:
        folder: of the run; reports are written there.
        timeout_s: how long a collective may wait, in seconds.
        """
        self._meeting = meeting
        self._folder = Path(folder)
        self._timeout_s = timeout_s
        self._interval_s = min(max(timeout_s / _INTERVALS, _LEAST_INTERVAL_S), _MOST_INTERVAL_S)
        self._grace_s = 2 * self._interval_s + _BUSY_S
        self._started = start_of(os.getpid())
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megarl-hang-watch", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def close(self) -> None:
        """Ends the watch. From any thread but its own."""
        self._is_closed.set()
        PROGRESS.changed.set()
        self._thread.join(_MOST_INTERVAL_S)  # the store may be gone, which it waits for

    def declare_failure(self, sentence: str) -> None:
        """Tells the others why this rank is about to leave, with its number; the first that fails is heard."""
        with contextlib.suppress(RuntimeError):  # the store is gone: then so is the run
            self._meeting.say_first(_FAILURE, sentence)

    def why_a_peer_left(self, local_ranks: Sequence[int]) -> str:
        """Why a connection to another rank broke.

        Args:
            local_ranks: ranks of this host, whose processes can be looked at.
        """
        deadline = time.monotonic() + _TURN_S
        with contextlib.suppress(RuntimeError):
            while True:
                if failure := self._meeting.heard_first(_FAILURE):
                    return failure[1]
                if dead := [record for record in self._records(local_ranks) if record.is_alive_here() is False]:
                    return f"{dead[0].process()} is gone, killed or crashed; it was last seen in {dead[0].place()}"
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_S)
        return UNKNOWN_REASON

    def _records(self, ranks: Sequence[int]) -> list[RankRecord]:
        found = [self._meeting.heard(_RECORD, rank) for rank in ranks]
        return [RankRecord.from_json(text) for text in found if text is not None]

    def _run(self) -> None:
        while not self._is_closed.is_set():
            PROGRESS.changed.clear()  # before the look, which may miss what changes meanwhile
            try:
                self._look()
            except RuntimeError as error:
                self._look_without_others(error)
            self._is_closed.wait(_PAUSE_S)
            PROGRESS.changed.wait(self._interval_s)

    def _look(self) -> None:
        record, meeting = self._record(), self._meeting
        meeting.say(_RECORD, record.to_json())
        if failure := meeting.heard_first(_FAILURE):
            self._leave_after(failure[1])
            return
        if meeting.heard_first(_QUESTION) is None:
            if (record.waited_s or 0.0) <= self._timeout_s:
                return
            finder, _ = meeting.say_first(_QUESTION, "where is every rank?")
            if finder == meeting.rank:
                self._report(record)
        self._answer()

    def _record(self) -> RankRecord:
        return record_of_this_process(self._meeting.rank, self._started, self._wait())

    def _wait(self) -> Wait | None:
        if (wait := PROGRESS.waits()) is not None:
            return wait
        silence = PROGRESS.silent_since_collective()
        # Whether the device is busy is only asked where the answer matters.
        if silence is not None and silence.seconds > self._interval_s and has_work_left():
            return silence
        return None

    def _report(self, record: RankRecord) -> NoReturn:
        """Asks all ranks, tells people, and leaves."""
        mine = Answer(record=record, stacks=stacks_of_this_process())
        hang = self._ask(mine)
        file = self._folder / time.strftime("hang-%Y%m%d-%H%M%S.txt")
        try:
            file.write_text(hang.report(), encoding="utf-8")
            where = f"stacks of all ranks that answered are in {file}"
        except OSError as error:
            where = f"the stacks could not be written to {file} ({error.strerror})"
            sys.stderr.write(hang.report())
        silent = [asdict(record) for record in hang.silent]
        with contextlib.suppress(RuntimeError):
            self._meeting.say_first(_REPORT, json.dumps({"blame": hang.blame(), "silent": silent}))
        self._end(f"{hang.sentence()}; {where}", hang.silent)

    def _ask(self, mine: Answer) -> Hang:
        answers = {mine.record.rank: mine}
        missing = [rank for rank in range(self._meeting.world_size) if rank != mine.record.rank]
        deadline = time.monotonic() + self._grace_s
        while missing and time.monotonic() < deadline:
            for rank in missing:
                if (text := self._meeting.heard(_ANSWER, rank)) is not None:
                    content = json.loads(text)
                    answers[rank] = Answer(record=RankRecord.from_json(content["record"]), stacks=content["stacks"])
            missing = [rank for rank in missing if rank not in answers]
            time.sleep(_PAUSE_S)
        silent = self._records(missing)
        known = {record.rank for record in silent}
        return Hang(
            finder=mine,
            answers=[answers[rank] for rank in sorted(answers)],
            silent=silent,
            unknown=[rank for rank in missing if rank not in known],
        )

    def _answer(self) -> NoReturn:
        """Says where this rank is, waits for the report, and leaves."""
        record = self._record()
        self._meeting.say(_ANSWER, json.dumps({"record": record.to_json(), "stacks": stacks_of_this_process()}))
        deadline = time.monotonic() + self._grace_s + 2 * _BUSY_S
        while (report := self._meeting.heard_first(_REPORT)) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        state = f"in {record.call()}, in {record.place()}" if record.waited_s is not None else f"in {record.place()}"
        if report is None:
            self._end(f"the run hangs, and the rank that was to say why has not; this rank was {state}")
        content = json.loads(report[1])
        silent = [RankRecord.from_json(json.dumps(values)) for values in content["silent"]]
        self._end(f"the run hangs: {content['blame']}; this rank was {state}", silent)

    def _look_without_others(self, error: RuntimeError) -> None:
        """The store does not answer: this rank can tell of itself alone."""
        wait = self._wait()
        if self._is_closed.is_set() or wait is None or wait.seconds <= self._timeout_s:
            return
        record = self._record()
        sys.stderr.write(f"rank {record.rank}:\n{stacks_of_this_process()}\n")
        self._end(
            f"has waited {wait.seconds:.0f} s in {record.call()}, in {record.place()}, and the store of torchrun does "
            f"not answer ({error}), so that nobody can say who is missing"
        )

    def _leave_after(self, reason: str) -> None:
        """Another rank has failed. This one would find out at its next collective, which may be far away.

        Returns where its main thread has found out itself.
        """
        if not self._is_closed.wait(_TURN_S):
            self._end(f"ends in {self._record().place()}, since {reason}")

    def _end(self, sentence: str, silent: Sequence[RankRecord] = ()) -> NoReturn:
        # torchrun would ask a stopped process to end, and wait half a minute before it insists.
        for record in silent:
            if record.is_alive_here():
                with contextlib.suppress(OSError):
                    os.kill(record.pid, signal.SIGKILL)
        leave(EXIT_FAILED, f"rank {self._meeting.rank}: {sentence}", sentence)
