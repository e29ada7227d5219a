"""Configs of runs whose metrics go to a tracker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megarl.config import RunConfig
from megarl.observe import Tracker


def tracked_config(folder: Path, *logger: str) -> RunConfig:
    """A run in `folder` with names that tests look for."""
    config = RunConfig()
    config.trainer.logger, config.trainer.default_local_dir = list(logger), str(folder)
    config.trainer.project_name, config.trainer.experiment_name = "arithmetic", "grpo-1"
    config.trainer.group_name = "seeds"
    config.optim.lr = 3e-6
    return config


def log_steps(config: RunConfig, steps: Iterable[int], *, scale: float = 1.0, resume_step: int | None = None) -> None:
    """Logs `actor/pg_loss` = scale · step, and an evaluation, as a whole process of a run would."""
    with Tracker(config, True, 10, "a run", resume_step=resume_step) as tracker:
        for step in steps:
            tracker.log(step, {"actor/pg_loss": scale * step, "val-core/openai/gsm8k/reward/mean@1": 0.25})
