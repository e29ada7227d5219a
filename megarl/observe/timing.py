"""How long the phases of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.platform.usage import synchronize


class Timers:
    """Wall-clock seconds by phase: `with timers("gen"): …`, then `timers.flush()`.

    A phase may run several times in a step, and phases may lie in one another: each counts its whole time, so `step`
    contains all others.

    A GPU works behind the back of the CPU: without waiting for it, a phase would be charged only for launching its
    kernels, and whoever waits next for the rest. So the GPU is waited for at both ends of a phase. That costs some
    ten microseconds, and the overlap between the end of one phase and the launches of the next; phases take seconds.
    `synchronize=False` switches it off, for loops that overlap phases on purpose. On a CPU it changes nothing.
    """

    def __init__(self, *, synchronize: bool = True) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._running: set[str] = set()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the `with` block to `phase`, also when it ends by an exception.

        Raises:
            ValueError: the phase is running already; its time would count twice.
        """
        if phase in self._running:
            raise ValueError(f"phase {phase!r} is being timed already")
        self._running.add(phase)
        self._wait()
        start = time.perf_counter()
        try:
            yield
            self._wait()  # not after an exception: a broken GPU would raise again and hide the first error
        finally:
            self._running.discard(phase)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def flush(self) -> dict[str, float]:
        """Seconds since the last flush as metrics, `timing_s/<phase>`; a phase that still runs is told when it ends."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{phase}": value for phase, value in seconds.items()}

    def _wait(self) -> None:
        if self._synchronize:
            synchronize()
