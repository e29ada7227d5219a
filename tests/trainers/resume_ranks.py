"""Runs that resume, or cannot, one after another on the ranks of this world, with what they tell people."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

from megarl.observe import Tracker
from tests.trainers.outcomes import outcomes


def outcomes_and_lines(
    config_path: Path, output: Path, runs: dict[str, list[str]], limits: dict[str, int]
) -> dict[str, tuple[str, list[str]]]:
    """As `outcomes`, with the lines that each run printed.

    Args:
        limits: bytes that files may have in a run, as if the disk were full then.
    """
    lines: list[str] = []
    Tracker.text = lambda self, message: lines.append(message)  # type: ignore[method-assign]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = {}
    for name, overrides in runs.items():
        lines.clear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.get(name, soft), hard))
        (outcome,) = outcomes(config_path, output, {name: overrides}).values()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        found[name] = (outcome, list(lines))
    return found
