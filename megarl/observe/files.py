"""Metrics on disk: JSON lines, and TensorBoard's event files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

_STEP_KEY = "step"


class JsonLines:
    """A file with one JSON object for each logging of a step: `step`, and every metric by name.

    NaN and infinity are written as null. JSON has no word for them: Python's default, a bare NaN, is refused by other
    readers, and a text would turn a column of numbers into one of texts.
    """

    def __init__(self, file: Path) -> None:
        """Opens `file` to append; makes its folder."""
        file.parent.mkdir(parents=True, exist_ok=True)
        # Line buffering: a run that is killed loses no step that it had finished.
        self._stream = file.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._stream.write(json.dumps({_STEP_KEY: step, **values}, allow_nan=False) + "\n")

    def close(self, *, failed: bool) -> None:
        self._stream.close()


class TensorBoard:
    """Event files that `tensorboard --logdir` shows, one scalar for each metric."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """Opens a new event file in `folder`.

        Args:
            first_step: steps from here on that earlier event files of the folder have are not shown any more.
        """
        from torch.utils.tensorboard import SummaryWriter  # takes a second, which runs without it need not spend

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def keep_steps(file: Path, last_step: int) -> int:
    """Takes the lines of later steps than `last_step` out of a file of JSON lines, if there is one.

    Returns:
        How many other lines went as well because they are not metrics, such as the half line that a killed process
        leaves at the end.
    """
    if not file.exists():
        return 0
    unreadable = 0
    # Whole under another name first: a crash in between must not cost the history.
    part = file.with_name(file.name + ".part")
    with file.open(encoding="utf-8", errors="replace") as lines, part.open("w", encoding="utf-8") as kept:
        for line in lines:
            step = _step_of(line)
            if step is None:
                unreadable += 1
            elif step <= last_step:
                kept.write(line.rstrip("\n") + "\n")
    os.replace(part, file)
    return unreadable


def move_aside(file: Path) -> Path | None:
    """Renames `file`, if there is one, to the first free of `metrics-1.jsonl`, `metrics-2.jsonl`, …; returns that."""
    if not file.exists():
        return None
    number = 1
    while (aside := file.with_name(f"{file.stem}-{number}{file.suffix}")).exists():
        number += 1
    file.rename(aside)
    return aside


def _step_of(line: str) -> int | None:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    step = values.get(_STEP_KEY) if isinstance(values, dict) else None
    return step if isinstance(step, int) else None
