"""What a sink is, and the guard before one that writes at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class Sink(Protocol):
    """Something that takes the metrics of steps."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step; may raise whatever its library raises."""
        ...

    def close(self, *, failed: bool) -> None:
        """Writes what is left and lets go; `failed` is whether the run ends by an exception."""
        ...


class GuardedSink:
    """A sink whose failures are warnings: the first as it happens, their number at the end.

    For sinks that write at once, on this machine. Each step is tried anew, so that a disk that was full for a while
    costs the steps of that while.
    """

    def __init__(self, name: str, sink: Sink, say: Callable[[str], None]) -> None:
        """Args:
        name: for people, as `trainer.logger` has it.
        say: prints one line.
        """
        self._name, self._sink, self._say = name, sink, say
        self._lost = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._sink.log(step, metrics)
        except Exception as error:  # whatever a library raises
            self._lost += 1
            if self._lost == 1:
                self._say(
                    f"warning: {self._name} did not take the metrics of step {step} ({one_line(error)}); the run goes "
                    "on, and later steps are tried again."
                )

    def close(self, *, failed: bool) -> None:
        try:
            self._sink.close(failed=failed)
        except Exception as error:
            self._say(f"warning: {self._name} could not be closed ({one_line(error)}): its last metrics may be lost.")
        if self._lost:
            self._say(f"warning: {self._name} is without {self._lost} logging(s) of metrics, which it did not take.")


def one_line(error: Exception) -> str:
    """An exception as part of a sentence: its kind and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].rstrip('. ')}" if text else type(error).__name__
