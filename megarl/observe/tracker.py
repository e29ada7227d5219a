"""Where the metrics of a run go: one object that rank 0 writes them through (`trainer.logger`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

from megarl.config import ConfigError
from megarl.observe.console import LineConsole, ProgressConsole, print_line
from megarl.observe.files import JsonLines, TensorBoard, keep_steps, move_aside


class _Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writes metrics to the sinks that a config names; on any rank but the main one it does nothing.

    A context manager: leaving it, also by an exception, closes the files and ends the progress bar.
    """

    def __init__(
        self,
        logger: Sequence[str],
        folder: str | Path,
        is_main: bool,
        total_steps: int | None,
        title: str,
        *,
        resume_step: int | None = None,
    ) -> None:
        """Opens the sinks.

        Args:
            logger: which of `console`, `tensorboard` (`folder/tensorboard`) and `jsonl` (`folder/metrics.jsonl`).
            is_main: whether this is the one rank that writes.
            total_steps: steps of the whole run, those before a resume included; None where nobody knows.
            title: what the progress bar is of.
            resume_step: last step of the checkpoint that the run continues. What an earlier process wrote for later
                steps is dropped, so that a curve has each step once. None for a run that begins: metrics of an
                earlier run in this folder are moved aside.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self._sinks: list[_Sink] = []
        self._console: LineConsole | ProgressConsole | None = None
        self._is_main = is_main
        if not is_main:
            return
        if "console" in logger:
            self._console = _make_console(total_steps, title, resume_step or 0)
            self._sinks.append(self._console)
        try:
            self._open_files(logger, Path(folder), resume_step)
        except OSError as error:
            self.close()  # the terminal gets its cursor back before the message
            raise ConfigError(
                f"metrics cannot be written to trainer.default_local_dir {str(folder)!r} "
                f"({error.strerror or error}): choose a folder that can be written."
            ) from None

    def _open_files(self, logger: Sequence[str], folder: Path, resume_step: int | None) -> None:
        if "jsonl" in logger:
            file = folder / "metrics.jsonl"
            if resume_step is None:
                earlier = move_aside(file)
                if earlier is not None:
                    self.text(f"metrics of an earlier run in this folder are now in {earlier}")
            else:
                unreadable = keep_steps(file, resume_step)
                if unreadable:
                    self.text(f"{file}: left out {unreadable} line(s) that are not metrics")
            self._sinks.append(JsonLines(file))
        if "tensorboard" in logger:
            first_step = 0 if resume_step is None else resume_step + 1
            self._sinks.append(TensorBoard(folder / "tensorboard", first_step=first_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step. Values are numbers or one-element tensors; NaN and infinity are welcome."""
        if not self._sinks:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink.log(step, numbers)

    def text(self, message: str) -> None:
        """Prints one line for people, above the progress bar. It is printed without the console sink too: that one
        shows metrics, while a message may be a warning."""
        if self._is_main:
            (self._console.text if self._console is not None else print_line)(message)

    def close(self) -> None:
        """Closes all sinks; a second call does nothing."""
        sinks, self._sinks, self._console = self._sinks, [], None
        for sink in sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_console(total_steps: int | None, title: str, steps_done: int) -> LineConsole | ProgressConsole:
    """A progress bar where a person looks on, plain lines in a log file or a pipe."""
    console = Console()
    # Not rich's `is_terminal`, which FORCE_COLOR makes true in the log files of CI systems.
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return ProgressConsole(total_steps, title, steps_done, console=console)
    return LineConsole(total_steps)
