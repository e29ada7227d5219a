"""What runs leave behind, as tests read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def dumped(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    """The samples of a step that all ranks wrote to `trainer.rollout_data_dir`, by group and index."""
    paths = (folder / f"step-{step:06d}").glob("rank-*.jsonl")
    samples = [json.loads(line) for path in paths for line in path.read_text().split("\n") if line]
    return sorted(samples, key=lambda sample: (sample["group"], sample["index"]))


def evaluated(folder: Path, step: int = 0) -> list[dict[str, Any]]:
    """The answers of an evaluation of the run in `folder`."""
    path = folder / "validation" / f"core-step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n") if line]
