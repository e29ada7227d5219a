"""What Prometheus would fetch, parsed with its own library."""

from __future__ import annotations

import math
import socket
import urllib.request
from pathlib import Path

import pytest

from megarl.config import RunConfig
from megarl.observe import Tracker
from tests.launch import LIMIT_S, free_ports
from tests.observe.sinks.configs import tracked_config

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run that answers on a port of the loopback interface that is free."""
    config = tracked_config(tmp_path / "out", "prometheus", "jsonl")
    config.observe.prometheus_host, (config.observe.prometheus_port,) = "127.0.0.1", free_ports(1)
    return config


def _fetch(config: RunConfig) -> dict[tuple[str, str], tuple[float, dict[str, str]]]:
    """Value and further labels by (name, `metric`)."""
    url = f"http://127.0.0.1:{config.observe.prometheus_port}/metrics"
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {family.type for family in families} <= {"gauge"}
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        found[sample.name, labels.pop("metric")] = (sample.value, labels)
    return found


def test_prometheus_gets_the_latest_value_of_each_metric_with_the_names_of_the_run(config: RunConfig) -> None:
    with Tracker(config, True, 10, "a run") as tracker:
        assert _fetch(config) == {}
        tracker.log(4, {"actor/pg_loss": 0.5, "val-core/openai/gsm8k/reward/mean@1": 0.25})
        tracker.log(5, {"actor/pg_loss": math.nan})
        found = _fetch(config)
    names = {"project": "arithmetic", "run": "grpo-1"}
    assert found["megarl_step", "step"] == (5.0, names)
    assert math.isnan(found["megarl_actor_pg_loss", "actor/pg_loss"][0])
    evaluation = "val-core/openai/gsm8k/reward/mean@1"
    assert found["megarl_val_core_openai_gsm8k_reward_mean_1", evaluation] == (0.25, names)
    assert found["megarl_last_step_timestamp_seconds", "last_step_timestamp_seconds"][0] > 1.7e9


def test_names_that_prometheus_writes_alike_are_told_apart_by_their_label(config: RunConfig) -> None:
    with Tracker(config, True, 10, "a run") as tracker:
        tracker.log(1, {"reward/a-b/mean": 1.0, "reward/a_b/mean": 2.0})
        found = _fetch(config)
    assert found["megarl_reward_a_b_mean", "reward/a-b/mean"][0] == 1.0
    assert found["megarl_reward_a_b_mean", "reward/a_b/mean"][0] == 2.0


def test_a_run_that_is_over_answers_no_more(config: RunConfig) -> None:
    with Tracker(config, True, 10, "a run"):
        pass
    with pytest.raises(OSError):
        _fetch(config)


def test_a_port_that_is_taken_is_a_warning_and_the_run_goes_on(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", config.observe.prometheus_port)), Tracker(config, True, 10, "x") as tracker:
        tracker.log(1, {"actor/pg_loss": 0.5})
    said = capsys.readouterr().out
    assert f"prometheus cannot listen on 127.0.0.1:{config.observe.prometheus_port}" in said
    assert "choose another observe.prometheus_port" in said
    assert len(Path(config.trainer.default_local_dir, "metrics.jsonl").read_text().splitlines()) == 1
