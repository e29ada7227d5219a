"""The rules of where metrics and traces go. Imports no torch."""

import os
from collections.abc import Iterator

from megarl.config.schema import RunConfig

_MLFLOW_VARIABLE = "MLFLOW_TRACKING_URI"


def observe_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """What is wrong with `observe` and the names of the run, one sentence each."""
    profile, steps = config.observe.profile, config.trainer.total_training_steps
    if missing := [rank for rank in profile.ranks if rank >= world_size]:
        yield (
            f"observe.profile.ranks has {', '.join(map(str, missing))}, but the run has {world_size} rank(s), counted "
            "from 0: leave out those that are not there."
        )
    if steps is not None and (late := [step for step in profile.steps if step > steps]):
        yield (
            f"observe.profile.steps has {', '.join(map(str, late))}, but trainer.total_training_steps is {steps}: "
            "choose steps of the run."
        )
    if profile.steps and not profile.ranks:
        yield "observe.profile.steps names steps, but observe.profile.ranks is empty: name ranks, e.g. [0]."
    if not config.trainer.project_name:
        yield "trainer.project_name is empty: name what the run belongs to, or leave the key out."


def missing_tracker_settings(config: RunConfig) -> Iterator[str]:
    """What trackers need to know and neither the config nor this machine's environment says."""
    names_mlflow = "mlflow" in config.trainer.logger
    if names_mlflow and not config.observe.mlflow_tracking_uri and not os.environ.get(_MLFLOW_VARIABLE):
        yield (
            "trainer.logger names mlflow, but neither observe.mlflow_tracking_uri nor the environment variable "
            f"{_MLFLOW_VARIABLE} says where it is: set one, e.g. observe.mlflow_tracking_uri=http://mlflow:5000."
        )
