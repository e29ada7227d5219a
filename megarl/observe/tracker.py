"""Where the metrics of a run go: one object that rank 0 writes them through (`trainer.logger`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from megarl.config import ConfigError, RunConfig
from megarl.observe.console import LineConsole, ProgressConsole, print_line
from megarl.observe.files import JsonLines, TensorBoard, keep_steps, move_aside
from megarl.observe.sinks import BackgroundSink, GuardedSink, RunIdentity, Sink


class Tracker:
    """Writes metrics to the sinks that a config names; on any rank but the main one it does nothing.

    Console, JSON lines and Prometheus take them at once, the others in threads of their own. A sink that fails is a
    warning, and never ends a run.

    A context manager: leaving it, also by an exception, sends what is left, closes the files and ends the progress bar.
    """

    def __init__(
        self,
        config: RunConfig,
        is_main: bool,
        total_steps: int | None,
        title: str,
        *,
        resume_step: int | None = None,
    ) -> None:
        """Opens the sinks.

        Args:
            config: `trainer.logger` names the sinks, `trainer` and `observe` say how; the files lie in
                `trainer.default_local_dir`, as `tensorboard` and `metrics.jsonl`.
            is_main: whether this is the one rank that writes.
            total_steps: steps of the whole run, those before a resume included; None where nobody knows.
            title: what the progress bar is of.
            resume_step: last step of the checkpoint that the run continues. What an earlier process wrote for later
                steps is dropped, so that a curve has each step once. None for a run that begins: metrics of an
                earlier run in this folder are moved aside.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self._sinks: list[Sink] = []
        self._console: LineConsole | ProgressConsole | None = None
        self._is_main = is_main
        if not is_main:
            return
        logger, folder = config.trainer.logger, Path(config.trainer.default_local_dir)
        if "console" in logger:
            self._console = _make_console(total_steps, title, resume_step or 0)
            self._sinks.append(GuardedSink("console", self._console, self._warn))
        try:
            if "jsonl" in logger:
                self._open_json_lines(folder / "metrics.jsonl", resume_step)
            if "tensorboard" in logger:
                self._open_tensorboard(folder / "tensorboard", resume_step)
        except OSError as error:
            self.close()  # the terminal gets its cursor back before the message
            raise ConfigError(
                f"metrics cannot be written to trainer.default_local_dir {str(folder)!r} "
                f"({error.strerror or error}): choose a folder that can be written."
            ) from None
        self._open_outside(config, RunIdentity.of(config, is_resumed=resume_step is not None))

    def _open_json_lines(self, file: Path, resume_step: int | None) -> None:
        if resume_step is None:
            earlier = move_aside(file)
            if earlier is not None:
                self.text(f"metrics of an earlier run in this folder are now in {earlier}")
        else:
            unreadable = keep_steps(file, resume_step)
            if unreadable:
                self.text(f"{file}: left out {unreadable} line(s) that are not metrics")
        # Not in the background: a run that is killed should leave every step that it had finished.
        self._sinks.append(GuardedSink("jsonl", JsonLines(file), self._warn))

    def _open_tensorboard(self, folder: Path, resume_step: int | None) -> None:
        first_step = 0 if resume_step is None else resume_step + 1
        # Made here, so that a folder that cannot be written is known before the first step.
        tensorboard = TensorBoard(folder, first_step=first_step)
        self._sinks.append(BackgroundSink("tensorboard", lambda: tensorboard, self._warn))

    def _open_outside(self, config: RunConfig, identity: RunIdentity) -> None:
        """The sinks of the extra `trackers`; their libraries are imported where they are wanted."""
        logger, observe = config.trainer.logger, config.observe

        def wandb() -> Sink:
            from megarl.observe.sinks.wandb_sink import WandbSink

            return WandbSink(identity, observe.wandb_mode, self._warn)

        def mlflow() -> Sink:
            from megarl.observe.sinks.mlflow_sink import MlflowSink

            return MlflowSink(identity, observe.mlflow_tracking_uri, self._warn)

        for name, make in (("wandb", wandb), ("mlflow", mlflow)):
            if name in logger:
                self._sinks.append(BackgroundSink(name, make, self._warn))
        if "prometheus" in logger:
            self._open_prometheus(identity, observe.prometheus_host, observe.prometheus_port)

    def _open_prometheus(self, identity: RunIdentity, host: str, port: int) -> None:
        from megarl.observe.sinks.prometheus_sink import PrometheusSink

        try:
            sink = PrometheusSink(identity, host, port)
        except OSError as error:
            self.text(
                f"warning: prometheus cannot listen on {host}:{port} ({error.strerror or error}), so the run goes on "
                "without: choose another observe.prometheus_port or observe.prometheus_host."
            )
        else:
            self._sinks.append(GuardedSink("prometheus", sink, self._warn))

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

    def _warn(self, message: str) -> None:
        """`text` for sinks, from any thread: a terminal that has gone away is no reason to fail either."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: stdout is closed
            self.text(message)

    def close(self, *, failed: bool = False) -> None:
        """Sends what is left and closes all sinks; a second call does nothing.

        Args:
            failed: whether the run ends before its last step, which wandb and MLflow show.
        """
        sinks, self._sinks = self._sinks, []
        # The console last: the others may have something to say.
        for sink in reversed(sinks):
            sink.close(failed=failed)
        self._console = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def _make_console(total_steps: int | None, title: str, steps_done: int) -> LineConsole | ProgressConsole:
    """A progress bar where a person looks on, plain lines in a log file or a pipe."""
    console = Console()
    # Not rich's `is_terminal`, which FORCE_COLOR makes true in the log files of CI systems.
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return ProgressConsole(total_steps, title, steps_done, console=console)
    return LineConsole(total_steps)
