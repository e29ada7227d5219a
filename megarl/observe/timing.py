"""How long the phases of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.observe.failure import mark_phases
from megarl.platform.progress import PROGRESS
from megarl.platform.usage import named_range, synchronize


class Timers:
    """Wall-clock seconds by phase: `with timers("gen"): …`, then `timers.flush()`.

    A phase may run several times in a step, and phases may lie in one another: each counts its whole time, so `step`
    contains all others. Each is a range of its name in traces of torch's profiler and of Nsight Systems, an exception
    that leaves it knows it (`failure.place_of`), and so do other ranks that wait for this one (`hang_watch`).

    A GPU works behind the back of the CPU: without waiting for it, a phase would be charged only for launching its
    kernels, and whoever waits next for the rest. So the GPU is waited for at both ends of a phase. That costs some
    ten microseconds, and the overlap between the end of one phase and the launches of the next; phases take seconds.
    `synchronize=False` switches it off, for loops that overlap phases on purpose. On a CPU it changes nothing.
    """

    def __init__(self, *, synchronize: bool = True) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the `with` block to `phase`, also when it ends by an exception.

        Raises:
            ValueError: the phase is running already; its time would count twice.
        """
        if phase in self._running:
            raise ValueError(f"phase {phase!r} is being timed already")
        self._running.append(phase)
        with named_range(phase), PROGRESS.in_phase(phase):
            self._wait()
            start = time.perf_counter()
            try:
                yield
                self._wait()  # not after an exception: a broken GPU would raise again and hide the first error
            except BaseException as error:
                mark_phases(error, self._running)
                raise
            finally:
                self._running.remove(phase)
                self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def flush(self) -> dict[str, float]:
        """Seconds since the last flush as metrics, `timing_s/<phase>`; a phase that still runs is told when it ends."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{phase}": value for phase, value in seconds.items()}

    def _wait(self) -> None:
        if self._synchronize:
            synchronize()
