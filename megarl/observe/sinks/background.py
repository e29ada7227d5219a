"""A sink in a thread of its own, so that a server that is slow or away holds up no step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from megarl.observe.sinks.guarded import Sink, one_line

QUEUE_LENGTH = 1000
"""Loggings that wait at most: hours of steps, and a few MiB. Beyond it the oldest go."""

ATTEMPTS = 8
"""For one logging. There may be something in it that the server will never take, which must not hold up the rest."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Between attempts; each wait is twice the last until something gets through."""

CLOSE_TIMEOUT_S = 30.0
"""How long the end of a run waits for what is still to be sent."""


class BackgroundSink:
    """Hands metrics to a sink in another thread, which also makes it: connecting may take as long as sending.

    What fails is tried again, at longer and longer intervals. The first failure is a warning as it happens, and what
    got lost is counted at the end.
    """

    def __init__(
        self, name: str, make: Callable[[], Sink], say: Callable[[str], None], *, first_wait_s: float = FIRST_WAIT_S
    ) -> None:
        """Starts the thread.

        Args:
            name: for people, as `trainer.logger` has it.
            make: makes the sink. Called again after it raised, and only in the thread.
            say: prints one line; from either thread.
            first_wait_s: seconds before the first repetition.
        """
        self._name, self._make, self._say, self._first_wait_s = name, make, say, first_wait_s
        self._sink: Sink | None = None
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._changed = threading.Condition()  # guards the two above and below that both threads write
        self._lost = 0
        self._closing = threading.Event()
        self._failed = False
        self._failures_in_a_row = 0
        self._last_error: Exception | None = None
        # A daemon: a server that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"megarl-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Puts the metrics into the queue, and never waits."""
        with self._changed:
            if len(self._waiting) == QUEUE_LENGTH:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append((step, dict(metrics)))
            self._changed.notify()

    def close(self, *, failed: bool, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits until everything is sent, at most `timeout_s`, and says what is not."""
        self._failed = failed
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            missing = self._lost + len(self._waiting)
        reason = "" if self._last_error is None else f"; last it failed with {one_line(self._last_error)}"
        if self._thread.is_alive():
            self._say(
                f"warning: {self._name} did not come to its end within {timeout_s:g} s, so its last metrics may be "
                f"lost ({missing} logging(s) are for certain{reason})."
            )
        elif missing:
            self._say(f"warning: {self._name} is without {missing} logging(s) of metrics{reason}.")

    def _run(self) -> None:
        while (record := self._next()) is not None:
            self._deliver(*record)
        if self._sink is not None:
            try:
                self._sink.close(failed=self._failed)
            except Exception as error:
                self._say(
                    f"warning: {self._name} could not be closed ({one_line(error)}): its last metrics may be lost."
                )

    def _next(self) -> tuple[int, Mapping[str, float]] | None:
        """Waits for the next logging; None when the run is over and all are sent."""
        with self._changed:
            while not self._waiting and not self._closing.is_set():
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _deliver(self, step: int, metrics: Mapping[str, float]) -> None:
        for _ in range(ATTEMPTS):
            try:
                if self._sink is None:
                    self._sink = self._make()
                self._sink.log(step, metrics)
            except Exception as error:  # whatever a library raises
                if self._last_error is None:
                    self._say(
                        f"warning: {self._name} did not take the metrics of step {step} ({one_line(error)}); the run "
                        "goes on, and it is tried again in the background."
                    )
                self._last_error = error
                if self._closing.is_set():
                    break  # one attempt is what the end of a run waits for
                self._wait()
            else:
                self._failures_in_a_row = 0
                return
        with self._changed:
            self._lost += 1

    def _wait(self) -> None:
        """Until it is worth trying again, or the run ends."""
        self._closing.wait(min(self._first_wait_s * 2**self._failures_in_a_row, LONGEST_WAIT_S))
        self._failures_in_a_row += 1
