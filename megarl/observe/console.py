"""The metrics that a person watches: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

EVALUATION_PREFIXES = ("val-core/", "val-sampled/", "val/")
"""What marks a metric as one of an evaluation that people watch; verl's, for RL and for SFT."""

_DETAIL_PREFIX = "val-aux/"
"""What marks details of an evaluation (verl's name): they go to the files only."""

_NOT_TRAINING = (*EVALUATION_PREFIXES, _DETAIL_PREFIX)

_REFRESHES_PER_S = 2
_BAR_WIDTH = 12
"""In characters; it leaves room for the first figure in a terminal of 80."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One of the metrics that the console shows."""

    label: str
    names: tuple[str, ...]
    """Metrics that this is; the first that a step has is shown."""
    form: str
    """Python's format, whose width keeps lines aligned"""
    beside_bar: bool = False
    """Whether it is one of the few that fit beside a progress bar."""


FIGURES = (
    Figure(label="score", names=("critic/score/mean",), form="7.3f", beside_bar=True),
    Figure(label="loss", names=("train/loss",), form="8.4f", beside_bar=True),
    Figure(label="pg_loss", names=("actor/pg_loss",), form="8.4f", beside_bar=True),
    Figure(label="vf_loss", names=("critic/vf_loss",), form="8.4f"),
    Figure(label="grad_norm", names=("actor/grad_norm", "train/grad_norm"), form="8.3g"),
    Figure(label="entropy", names=("actor/entropy",), form="6.3f"),
    Figure(label="response", names=("response_length/mean",), form="7.1f"),
    Figure(label="tokens/s", names=("perf/tokens_per_s",), form="8,.0f", beside_bar=True),
    Figure(label="seconds", names=("perf/time_per_step", "timing_s/step"), form="7.1f"),
)
"""Most important first."""


def step_figures(metrics: Mapping[str, float], figures: Iterable[Figure] = FIGURES) -> str:
    """The main figures of a step in one line, aligned with those of other steps; empty where there is none."""
    parts = []
    for figure in figures:
        name = next((name for name in figure.names if name in metrics), None)
        if name is not None:
            parts.append(f"{figure.label} {metrics[name]:{figure.form}}")
    return "  ".join(parts)


def evaluation_lines(metrics: Mapping[str, float]) -> list[str]:
    """One line for each data source among the evaluation's metrics, e.g. `openai/gsm8k/reward  mean@1 0.310`."""
    by_source: dict[str, list[str]] = {}
    for name, value in metrics.items():
        for prefix in EVALUATION_PREFIXES:
            if name.startswith(prefix):
                # A data source may have slashes of its own; only the last part is surely the statistic.
                source, _, statistic = name.removeprefix(prefix).rpartition("/")
                by_source.setdefault(source, []).append(f"{statistic} {value:.4g}")
    return ["  ".join(filter(None, [source, *statistics])) for source, statistics in by_source.items()]


def print_line(message: str) -> None:
    """Prints at once: through a pipe, Python would keep lines back until it has a few thousand characters."""
    print(message, flush=True)


class LineConsole:
    """One line a step, and one for each data source of an evaluation."""

    def __init__(self, total_steps: int | None) -> None:
        self._total_steps = total_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        label = _step_label(step, self._total_steps)
        training = {name: value for name, value in metrics.items() if not name.startswith(_NOT_TRAINING)}
        if training:
            figures = step_figures(training) or _as_they_are(training)
            print_line(f"{label}  {figures}")
        for line in evaluation_lines(metrics):
            print_line(f"{label}  EVALUATION  {line}")

    def text(self, message: str) -> None:
        print_line(message)

    def close(self, *, failed: bool) -> None:
        """Nothing is held open."""


class ProgressConsole:
    """A bar over the steps with the main figures beside it; evaluations and messages scroll by above it."""

    def __init__(self, total_steps: int | None, title: str, steps_done: int, *, console: Console) -> None:
        """Shows the bar on `console`, starting at `steps_done`."""
        self._total_steps = total_steps
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            # Takes what is left of the width: in a narrow terminal figures are cut, and not the count of steps.
            TextColumn("{task.fields[figures]}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
            expand=True,
            console=console,
            refresh_per_second=_REFRESHES_PER_S,
        )
        self._task = self._progress.add_task(title, total=total_steps, completed=steps_done, figures="")
        self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = step_figures(metrics, (figure for figure in FIGURES if figure.beside_bar))
        if figures:
            # An evaluation logged on its own leaves the figures of the last step where they are.
            self._progress.update(self._task, figures=" ".join(figures.split()))
        self._progress.update(self._task, completed=step)
        for line in evaluation_lines(metrics):
            self.text(f"{_step_label(step, self._total_steps)}  EVALUATION  {line}")

    def text(self, message: str) -> None:
        # Without soft_wrap rich would break a path in two; with markup it would swallow [words in brackets].
        self._progress.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self, *, failed: bool) -> None:
        """Leaves the bar as it stands and gives the terminal back."""
        self._progress.stop()


def _step_label(step: int, total_steps: int | None) -> str:
    if total_steps is None:
        return f"step {step:6d}"
    return f"step {step:{len(str(total_steps))}d}/{total_steps}"


def _as_they_are(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
