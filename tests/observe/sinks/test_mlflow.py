"""What MLflow has of a run, asked of MLflow itself over a store in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.sinks.configs import log_steps, tracked_config

pytest.importorskip("mlflow")

from mlflow.tracking import MlflowClient

from megarl.observe.sinks.mlflow_sink import metric_name


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its address. MLflow 3 wants to be asked for a store in files, which needs no server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


def _curve(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]


def test_a_run_has_its_names_its_config_and_every_step_once_though_it_was_resumed(tmp_path: Path, store: str) -> None:
    config = tracked_config(tmp_path / "out", "mlflow")
    config.observe.mlflow_tracking_uri = store
    log_steps(config, range(4))
    log_steps(config, range(3, 6), scale=10.0, resume_step=2)
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("arithmetic")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "grpo-1"
    assert run.info.status == "FINISHED"
    assert run.data.tags["megarl.group"] == "seeds"
    assert run.data.params["optim.lr"] == "3e-06"
    assert run.data.params["trainer.project_name"] == "arithmetic"
    curve = _curve(client, run.info.run_id, "actor/pg_loss")
    assert curve == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]
    assert _curve(client, run.info.run_id, "val-core/openai/gsm8k/reward/mean_at_1")[0] == (0, 0.25)


def test_steps_that_a_rollback_takes_again_keep_their_first_metrics_though_the_run_was_resumed_then(
    tmp_path: Path, store: str
) -> None:
    config = tracked_config(tmp_path / "out", "mlflow")
    config.observe.mlflow_tracking_uri = store
    log_steps(config, [1, 2, 3, 4, 2, 3])
    log_steps(config, [4, 5], scale=10.0, resume_step=3)
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("arithmetic")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    curve = _curve(client, run.info.run_id, "actor/pg_loss")
    assert curve == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]


def test_a_run_that_begins_anew_in_a_used_folder_is_another_run(tmp_path: Path, store: str) -> None:
    config = tracked_config(tmp_path / "out", "mlflow")
    config.observe.mlflow_tracking_uri = store
    log_steps(config, range(1, 2))
    log_steps(config, range(1, 2))
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("arithmetic")
    assert experiment is not None and len(client.search_runs([experiment.experiment_id])) == 2


def test_a_run_that_fails_is_shown_as_failed(tmp_path: Path, store: str) -> None:
    from megarl.observe import Tracker

    config = tracked_config(tmp_path / "out", "mlflow")
    config.observe.mlflow_tracking_uri = store
    with pytest.raises(ZeroDivisionError), Tracker(config, True, 10, "a run") as tracker:
        tracker.log(1, {"actor/pg_loss": 0.5})
        raise ZeroDivisionError
    client = MlflowClient(tracking_uri=store)
    run = client.get_run((tmp_path / "out" / "trackers" / "mlflow-id").read_text().strip())
    assert run.info.status == "FAILED"
    assert run.data.metrics == {"actor/pg_loss": 0.5}


def test_a_run_that_somebody_deleted_from_mlflow_is_begun_anew(tmp_path: Path, store: str) -> None:
    config = tracked_config(tmp_path / "out", "mlflow")
    config.observe.mlflow_tracking_uri = store
    (tmp_path / "out" / "trackers").mkdir(parents=True)
    (tmp_path / "out" / "trackers" / "mlflow-id").write_text("0" * 32 + "\n")
    log_steps(config, range(3, 4), resume_step=2)
    run_id = (tmp_path / "out" / "trackers" / "mlflow-id").read_text().strip()
    assert _curve(MlflowClient(tracking_uri=store), run_id, "actor/pg_loss") == [(3, 3.0)]


def test_names_keep_what_mlflow_allows() -> None:
    assert metric_name("val-core/openai/gsm8k/reward/mean@4") == "val-core/openai/gsm8k/reward/mean_at_4"
    assert metric_name("val-core//odd [source]/x") == "val-core/odd _source_/x"
    assert metric_name("reward/../é") == "_"
