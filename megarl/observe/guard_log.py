"""What guards did, on disk: `guards.jsonl` in a run's folder, one JSON object for each time that one fired."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.observe.files import move_aside

LOG_NAME = "guards.jsonl"


class GuardLog:
    """The file; on any rank but the main one it does nothing."""

    def __init__(self, folder: str | Path, is_main: bool, tell: Callable[[str], None], *, lines: int | None) -> None:
        """Args:
        tell: takes a sentence where the file cannot be written, which does not stop a run.
        lines: how many a run that is resumed had written by its checkpoint: later ones go. None for a run that
            begins, which moves the file of an earlier run aside.
        """
        self._file = Path(folder, LOG_NAME)
        self._is_main = is_main
        self._tell = tell
        if is_main:
            self._attempt((lambda: move_aside(self._file)) if lines is None else (lambda: self._cut(lines)))

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line. NaN and infinity become null, for which JSON has no word."""
        if self._is_main:
            values = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in line.items()
            }
            self._attempt(lambda: self._append(json.dumps(values, allow_nan=False, ensure_ascii=False)))

    def _append(self, line: str) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def _cut(self, lines: int) -> None:
        if not self._file.exists():
            return
        kept = self._file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[:lines]
        part = self._file.with_name(self._file.name + ".part")
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, self._file)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            self._tell(f"warning: {self._file} cannot be written ({error.strerror or error}); guards act all the same")
