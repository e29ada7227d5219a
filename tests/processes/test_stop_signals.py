"""A process that listens notes what it is asked, and does not die of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.processes.stop_signals import EXIT_PREEMPTED
from tests.launch import LIMIT_S, ROOT

LONG_S, SHORT_S = "600", "0.2"


@contextmanager
def listening(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A listener, and the process id of a program that it has started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.processes.listener", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        child = int(line_of(process, "listening").split()[1])
        yield process, child
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str], beginning: str) -> str:
    """The next line that begins so; what comes before it is passed over."""
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"the listener ended before it said {beginning}: {process.stderr.read()}")


def test_a_request_is_noted_and_the_process_goes_on() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with listening(LONG_S) as (process, _):
            process.send_signal(number)
            line_of(process, number.name)
            assert process.poll() is None
            assert f"{number.name}: the run ends after this step" in process.stderr.readline()


def test_before_the_first_step_nobody_is_promised_a_checkpoint() -> None:
    with listening(LONG_S, "start") as (process, _):
        process.send_signal(signal.SIGUSR1)
        assert process.stderr.readline() == (
            "SIGUSR1: the run ends before its first step; a second SIGUSR1 ends it at once\n"
        )


def test_sigusr1_does_not_reach_the_programs_that_the_process_has_started() -> None:
    """Slurm sends it to all of them."""
    with listening(LONG_S) as (process, child):
        os.kill(child, signal.SIGUSR1)
        process.send_signal(signal.SIGUSR1)
        assert line_of(process, "SIGUSR1").split() == ["SIGUSR1", "None"]  # the child still runs


def test_the_same_signal_once_more_at_the_same_time_is_the_same_request() -> None:
    with listening(LONG_S, LONG_S) as (process, _):
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            line_of(process, "noted SIGTERM")
        process.send_signal(signal.SIGUSR1)
        line_of(process, "SIGUSR1")
        assert process.poll() is None


def test_a_second_signal_later_ends_the_process_at_once() -> None:
    with listening(LONG_S, "0") as (process, _):
        process.send_signal(signal.SIGUSR1)
        line_of(process, "noted SIGUSR1")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=LIMIT_S) == EXIT_PREEMPTED
        assert "rank 0: a second SIGUSR1: the run ends at once" in process.stderr.read()


def test_after_sigterm_the_process_leaves_when_its_grace_is_over() -> None:
    with listening(SHORT_S) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == EXIT_PREEMPTED
        assert "rank 0: SIGTERM: no step ended, with a checkpoint of it, within 0.2 s" in process.stderr.read()


def test_sigterm_before_the_first_step_ends_the_process_at_once() -> None:
    """torchrun sends it where another rank has failed, which this one may be waiting for."""
    with listening(LONG_S, "start") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == EXIT_PREEMPTED
        assert "rank 0: SIGTERM before the first step: the run ends at once" in process.stderr.read()
