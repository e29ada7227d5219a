"""How far this process has come: its step, phase and micro-batch, and the collective that it is in.

Loops, `Timers` and the pipeline mark it, and so do the functions of torch.distributed (`platform.collectives`). Who
looks at it is `observe.hang_watch`, from a thread of its own. A mark costs about a microsecond and takes no lock:
every field is replaced as a whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_WHOLE_STEP = "step"
"""The phase that contains the others says nothing that the step's number does not."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One call that waits for other ranks."""

    name: str
    """As torch.distributed has it, e.g. `all_reduce`."""
    group: Any = None
    """A process group; None: the world's."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A collective and how long this process has been waiting for it."""

    collective: Collective
    seconds: float


class Progress:
    """The marks of one process."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.micro_batch: tuple[int, int] | None = None
        """Number from 1, and how many there are."""
        self.collective: Collective | None = None
        """The latest."""
        self.changed = threading.Event()
        """Is set with each step and phase; who waits for it clears it."""
        self._phases: tuple[str, ...] = ()
        self._inside: dict[int, tuple[Collective, float]] = {}
        self._returned: tuple[Collective, float] | None = None

    @property
    def phase(self) -> str | None:
        """The innermost, as `Timers` names it."""
        inner = self._phases[-1] if self._phases else None
        return None if inner == _WHOLE_STEP else inner

    def begin_step(self, step: int) -> None:
        """Marks a turn of the loop."""
        self.step = step
        self._moved_on()

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Marks the block. Phases may lie in one another."""
        before, self._phases = self._phases, (*self._phases, phase)
        self._moved_on()
        try:
            yield
            self._moved_on()  # not after an exception: who reports it asks for the micro-batch
        finally:
            self._phases = before
            self.changed.set()

    def begin_micro_batch(self, number: int, count: int) -> None:
        """Marks a forward pass, whose backward pass may come much later.

        Args:
            number: from 1.
            count: micro-batches of this call.
        """
        self.micro_batch, self._returned = (number, count), None

    def begin_collective(self, name: str, group: Any) -> bool:
        """Marks that this thread waits for others; False where it does so already, inside of another call."""
        thread = threading.get_ident()
        if thread in self._inside:
            return False
        self.collective = collective = Collective(name, group)
        self._inside[thread] = (collective, time.monotonic())
        return True

    def end_collective(self) -> None:
        """Marks that this thread waits no more."""
        collective, _ = self._inside.pop(threading.get_ident())
        self._returned = (collective, time.monotonic())

    def waits(self) -> Wait | None:
        """The collective that a thread of this process has been in the longest."""
        waits = list(self._inside.values())
        if not waits:
            return None
        collective, since = min(waits, key=lambda wait: wait[1])
        return Wait(collective, time.monotonic() - since)

    def silent_since_collective(self) -> Wait | None:
        """The collective that returned, where nothing has been marked since.

        A GPU's collectives return when they are launched, and the process waits for them wherever it next needs
        something of the device.
        """
        returned = self._returned
        return None if returned is None else Wait(returned[0], time.monotonic() - returned[1])

    def _moved_on(self) -> None:
        self.micro_batch = self._returned = None
        self.changed.set()


PROGRESS = Progress()
"""Of this process."""
