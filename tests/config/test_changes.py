"""What differs between the config of a checkpoint and that of the run that goes on with it."""

from __future__ import annotations

import json

from megarl.config import RunConfig
from megarl.config.changes import FIXED, as_record, changes
from megarl.config.fields import config_keys


def test_the_same_config_has_no_changes_after_a_way_through_json() -> None:
    config = RunConfig()
    assert changes(json.loads(json.dumps(as_record(config))), config) == []


def test_each_changed_key_is_a_line_with_both_values() -> None:
    record, config = as_record(RunConfig()), RunConfig()
    config.optim.lr = 3e-6
    config.algorithm.adv_estimator = "rloo"
    config.preference.beta = 0.5
    config.data.train_files = ["a.parquet"]
    assert sorted(map(str, changes(record, config))) == [
        "algorithm.adv_estimator: grpo → rloo",
        "data.train_files: [] → [a.parquet]",
        "optim.lr: 1e-06 → 3e-06",
        "preference.beta: 0.1 → 0.5",
    ]


def test_where_a_run_lies_is_no_change() -> None:
    record, config = as_record(RunConfig()), RunConfig()
    config.trainer.default_local_dir, config.trainer.resume_mode = "elsewhere", "path"
    config.trainer.resume_from_path = "there"
    assert changes(record, config) == []


def test_a_key_that_an_earlier_version_did_not_have_had_its_default() -> None:
    record, config = as_record(RunConfig()), RunConfig()
    del record["checkpoint"]
    del record["optim"]["lr"]
    assert changes(record, config) == []
    config.checkpoint.keep_last = 3
    assert [change.key for change in changes(record, config)] == ["checkpoint.keep_last"]


def test_the_keys_that_cannot_change_exist() -> None:
    assert {*FIXED} <= {key.name for key in config_keys(RunConfig)}
