"""Signals that ask a run to stop: SIGUSR1 ("in good time") and SIGTERM ("soon").

The signals themselves are handled by a thread. Python's own handlers run in the main thread, which may be inside a
collective that will never end: then neither the end of a grace period nor a second signal would be noticed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, run it again. Slurm templates requeue on it."""

SAME_REQUEST_S = 5.0
"""Signals this soon after the first are the same request: Slurm signals every process of a job, and torchrun then
passes on to its ranks what it has received itself."""

_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class StopSignals:
    """What this process was asked so far. One for a process (`listen`)."""

    def __init__(self, grace_s: float) -> None:
        """Starts to listen. Main thread only, and before other threads and children are started (see below).

        Args:
            grace_s: seconds after SIGTERM within which the process has to be gone; then it leaves at once.
        """
        self.request: signal.Signals | None = None
        """The latest kind of request; None if there was none."""
        self.has_something_to_lose = False
        """Until this is set, SIGTERM ends the process at once: it may be waiting for ranks that never come, since one
        of them has failed, and torchrun starts all ranks again only when this one is gone."""
        self._grace_s = grace_s
        self._first: dict[signal.Signals, float] = {}
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # Before the handlers: a signal that comes between the two must not be lost.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Not SIG_IGN: the interpreter writes the number of a signal into the pipe only where it has a handler.
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        # Slurm sends SIGUSR1 to every process of a job. Threads and programs started from here on inherit this mask, so
        # that the signal cannot kill an engine's processes or what a reward function has started. SIGTERM is left
        # alone: parents end their children with it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        threading.Thread(target=self._watch, name="megarl-signals", daemon=True).start()

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        while True:
            ready, _, _ = select.select([self._reader], [], [], self._seconds_left())
            if not ready:
                _leave(f"SIGTERM: no step ended, with a checkpoint of it, within {self._grace_s:g} s")
            for number in os.read(self._reader, 64):
                if number in _SIGNALS:  # the pipe gets SIGINT too
                    self._receive(signal.Signals(number))

    def _seconds_left(self) -> float | None:
        if signal.SIGTERM not in self._first:
            return None
        return max(self._first[signal.SIGTERM] + self._grace_s - time.monotonic(), 0.0)

    def _receive(self, number: signal.Signals) -> None:
        if number is signal.SIGTERM and not self.has_something_to_lose:
            _leave("SIGTERM before the first step: the run ends at once, since it has nothing to save")
        now = time.monotonic()
        if now - self._first.setdefault(number, now) > SAME_REQUEST_S:
            _leave(f"a second {number.name}: the run ends at once")
        if self.request is None and _rank() == "0":
            print(_announcement(number, self.has_something_to_lose), file=sys.stderr, flush=True)
        self.request = number


_listener: StopSignals | None = None


def listen(grace_s: float) -> StopSignals:
    """Makes this process note SIGUSR1 and SIGTERM instead of dying of them; for the arguments, see `StopSignals`."""
    global _listener
    _listener = StopSignals(grace_s)
    return _listener


def begin_steps() -> None:
    """From now on a request is acted on after a step, if this process listens."""
    if _listener is not None:
        _listener.has_something_to_lose = True


def stop_request() -> signal.Signals | None:
    """What this process was asked, if it listens and was asked anything."""
    return _listener.request if _listener is not None else None


def _announcement(number: signal.Signals, has_something_to_lose: bool) -> str:
    end = "after this step, with a checkpoint" if has_something_to_lose else "before its first step"
    # torchrun ends the ranks that are left with the signal that it passes on when it is asked to stop itself.
    unless = ", unless torchrun sent it because a rank has failed" if number is signal.SIGTERM else ""
    what = f"{number.name}: the run ends {end}{unless}"
    return f"{what}; a second {number.name} ends it at once"


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _leave(reason: str) -> None:
    """Ends the process without anything that could wait."""
    print(f"rank {_rank()}: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_PREEMPTED)
