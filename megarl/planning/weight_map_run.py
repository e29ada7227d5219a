"""Runs the proof of the weight map for the models of a run, in a process of its own; nothing here imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.config.layout import Layout
from megarl.config.schema import RunConfig
from megarl.planning.architecture import Head
from megarl.planning.memory import ModelUse

_ROLES = {Head.LOGITS: "causal_lm", Head.VALUE: "critic", Head.SCORE: "reward"}
"""`models.build.Role`, whose module imports torch."""

_LAST_LINES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """What the proof says about one model."""

    models: tuple[str, ...]
    """Those of the run that have these weights: actor and reference, say."""
    problems: Sequence[str]
    """Empty: every tensor is held exactly once."""
    tensors: int = 0
    elements: int = 0
    built: int = 0
    """Ranks whose modules were built; each other rank holds the same as one of them."""
    largest: int = 0
    """Weights of the rank that has most."""
    seconds: float = 0.0


def map_weights(config: RunConfig, layout: Layout, models: Sequence[ModelUse]) -> list[WeightMap]:
    """The map of every distinct model of a run.

    Raises:
        RuntimeError: the process that builds the modules failed; the message ends with what it printed last.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for model in models:
        names.setdefault((_folder(config, model), _ROLES[model.head]), []).append(model.name)
    answers = run_proofs([(folder, layout, role) for folder, role in names])
    return [WeightMap(models=tuple(used), **answer) for used, answer in zip(names.values(), answers, strict=True)]


def run_proofs(requests: Sequence[tuple[str | Path, Layout, str]]) -> list[dict]:
    """Proves (folder, layout, role) each, in one process.

    Raises:
        RuntimeError: as `map_weights`.
    """
    asked = [
        {"folder": str(Path(folder).absolute()), "layout": asdict(layout), "role": role}
        for folder, layout, role in requests
    ]
    with tempfile.TemporaryDirectory(prefix="megarl-map-") as folder:
        file = Path(folder, "answers.json")
        # One thread: tensors without memory have no work for more, and the processes fill the cores.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [sys.executable, "-m", "megarl.planning.simulated_ranks", json.dumps(asked), str(file)],
            env=environment,
            capture_output=True,
            text=True,
        )
        if result.returncode != 0:
            last = " ".join(result.stderr.strip().splitlines()[-_LAST_LINES:])
            raise RuntimeError(f"the weight map could not be built (exit status {result.returncode}): {last}")
        return json.loads(file.read_text())


def _folder(config: RunConfig, model: ModelUse) -> str:
    paths = {"critic": config.critic.path, "reward model": config.reward.model.path}
    return paths.get(model.name) or config.model.path
