"""The checkpoints in a run's folder: which there are, which to keep, and how those that go are taken away.

Nothing here is collective: one rank, rank 0, moves and deletes. Imports no torch.
"""

from __future__ import annotations

import math
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS_FOLDER, ASIDE_FOLDER = "checkpoints", "set-aside"
_STEP_NAME = re.compile(r"step-(\d{6,})")
_LEFT_BEHIND = (".step-*.partial*", ".step-*.deleted-*")
"""What a killed process may have left: a checkpoint that was being written, or deleted."""


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run, CHECKPOINTS_FOLDER, f"step-{step:06d}")


def checkpoints_of(run: str | Path) -> dict[int, Path]:
    """The checkpoints of a run by step, in order. Unfinished ones have other names."""
    found = {
        int(match[1]): path
        for path in Path(run, CHECKPOINTS_FOLDER).glob("step-*")
        if (match := _STEP_NAME.fullmatch(path.name))
    }
    return dict(sorted(found.items()))


def clean_up(run: str | Path) -> None:
    """Deletes what killed saves of this run left behind. Only while nobody else writes there (`run_lock`)."""
    for pattern in _LEFT_BEHIND:
        for path in Path(run, CHECKPOINTS_FOLDER).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(run: str | Path, *, after: int) -> list[Path]:
    """Moves the checkpoints of later steps out of the way of a run that goes on after `after`; returns where to.

    They are damaged, or of a course that the run leaves. Left in place, they would be taken for its newest ones.
    """
    moved = []
    for step, path in checkpoints_of(run).items():
        if step > after:
            target = path.parent / ASIDE_FOLDER / path.name
            number = 1
            while target.exists():
                number += 1
                target = target.with_name(f"{path.name}-{number}")
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
            moved.append(target)
    return moved


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints a run keeps: those that any of these rules names, and always the newest."""

    keep_last: int | None
    """So many of the newest; None: all."""
    keep_every: int | None
    """Those of steps that are multiples."""
    keep_best: int
    """So many with the best metric."""
    best_mode: str
    """Whether `max` or `min` is best."""

    def surplus(self, metrics: Mapping[int, float | None], protected: Collection[int] = ()) -> list[int]:
        """The steps whose checkpoints go.

        Args:
            metrics: of each step that has a checkpoint, the metric that says which is best; None where it is unknown.
            protected: steps that stay whatever the rules say.
        """
        steps = sorted(metrics)
        if self.keep_last is None or not steps:
            return []
        kept = {*steps[-self.keep_last :], *protected, *self._best(metrics)}
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        return [step for step in steps if step not in kept]

    def _best(self, metrics: Mapping[int, float | None]) -> list[int]:
        sign = -1.0 if self.best_mode == "max" else 1.0
        known = {step: value for step, value in metrics.items() if value is not None and not math.isnan(value)}
        # Of equals the later one: it has learned more.
        return sorted(known, key=lambda step: (sign * known[step], -step))[: self.keep_best]


def delete(folder: Path) -> None:
    """Deletes a checkpoint, which disappears at once: half of one is never seen under its name.

    Raises:
        OSError: it cannot be renamed.
    """
    doomed = folder.with_name(f".{folder.name}.deleted-{secrets.token_hex(4)}")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
