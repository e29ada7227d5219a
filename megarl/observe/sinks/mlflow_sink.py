"""Metrics to an MLflow server (https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html)."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from megarl.observe.sinks.identity import RunIdentity

_ID = "mlflow-id"
_LAST_STEP = "megarl.last_step"
_GROUP = "megarl.group"

_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""That one request may hold (MLflow's REST API, `runs/log-batch`)."""

_MOST_CHARACTERS = 6000
"""Of a parameter's value, since MLflow 2.8."""

_T = TypeVar("_T")


class MlflowSink:
    """One run in MLflow, which a resumed run continues under its id.

    A step that MLflow has is not sent again, since it would keep both: after a resume, the steps since the checkpoint
    keep the metrics of the process that was ended, and those that a guard's rollback takes again their first ones.
    """

    def __init__(self, identity: RunIdentity, tracking_uri: str | None, say: Callable[[str], None]) -> None:
        """Finds or makes the run.

        Args:
            tracking_uri: of the server; None for what MLFLOW_TRACKING_URI says.
            say: prints one line, about which run it is.

        Raises:
            MlflowException: the server does not answer, or refuses.
        """
        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._last_step = -1
        kept = identity.kept(_ID)
        if kept is None or not self._continue(kept):
            self._begin(identity)
        identity.keep(_ID, self._run_id)
        say(f"mlflow: run {self._run_id} of experiment {identity.project!r}")

    def _begin(self, identity: RunIdentity) -> None:
        tags = {} if identity.group is None else {_GROUP: identity.group}
        run = self._client.create_run(self._experiment(identity.project), tags=tags, run_name=identity.name)
        self._run_id: str = run.info.run_id
        params = [Param(key, _shortened(value)) for key, value in identity.flat_settings()]
        for part in _parts(params, _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=part)

    def _continue(self, run_id: str) -> bool:
        """Takes up the run; False if somebody has deleted it. Its parameters stay, since MLflow changes none."""
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        self._run_id = run_id
        self._client.update_run(run_id, status="RUNNING")
        self._last_step = int(run.data.tags.get(_LAST_STEP, -1))
        return True

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException as error:
            # Another run may have made it in the meantime.
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise error
            return str(experiment.experiment_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._last_step:
            return
        now_ms = int(time.time() * 1000)
        items = [Metric(metric_name(name), value, now_ms, step) for name, value in metrics.items()]
        for part in _parts(items, _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=part, tags=[RunTag(_LAST_STEP, str(step))])
        self._last_step = step

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")


def metric_name(name: str) -> str:
    """A metric's name with only what MLflow allows; `mean@4` becomes `mean_at_4`, as in verl."""
    allowed = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)
    # It has to be a path within the run.
    return posixpath.normpath("/" + allowed).lstrip("/")


def _shortened(value: object) -> str:
    return str(value)[:_MOST_CHARACTERS]


def _parts(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
