"""What wandb wrote, read back from the files of its offline mode."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import LIMIT_S
from tests.observe.sinks.configs import log_steps, tracked_config

pytest.importorskip("wandb")

from wandb.proto import wandb_internal_pb2

_HEADER_BYTES, _BLOCK_BYTES = 7, 32768


def _records(file: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: LevelDB's log format, each a protobuf."""
    data, place, parts = file.read_bytes(), _HEADER_BYTES, b""
    while place + _HEADER_BYTES <= len(data):
        if (left := _BLOCK_BYTES - place % _BLOCK_BYTES) < _HEADER_BYTES:
            place += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, place)
        place += _HEADER_BYTES
        if place + length > len(data):
            return  # not written to its end yet
        parts += data[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or the last part of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def _runs(folder: Path) -> list[list[Any]]:
    """The records of each process, in order; wandb's own process may still be writing the last ones."""
    end = time.monotonic() + LIMIT_S / 5
    while True:
        runs = [list(_records(file)) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
        if all(_of_kind(records, "exit") for records in runs):
            return runs
        assert time.monotonic() < end, "a file has no end"
        time.sleep(0.05)


def _of_kind(records: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def _curve(records: list[Any], name: str) -> list[tuple[int, float]]:
    points = []
    for history in _of_kind(records, "history"):
        values = {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in history.item}
        points.append((history.step.num, json.loads(values[name])))
    return points


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of steps 0 to 3 whose last checkpoint was step 2, and the process that continued it."""
    folder = tmp_path_factory.mktemp("wandb") / "out"
    config = tracked_config(folder, "wandb")
    config.observe.wandb_mode = "offline"
    log_steps(config, range(4))
    log_steps(config, range(3, 6), scale=10.0, resume_step=2)
    return folder


def test_a_run_has_its_names_its_config_and_every_step(folder: Path) -> None:
    first, _ = _runs(folder)
    run = _of_kind(first, "run")[0]
    assert (run.project, run.display_name, run.run_group) == ("arithmetic", "grpo-1", "seeds")
    settings = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert settings["optim"]["lr"] == 3e-6
    assert settings["trainer"]["project_name"] == "arithmetic"
    assert _curve(first, "actor/pg_loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert _curve(first, "val-core/openai/gsm8k/reward/mean@1")[0] == (0, 0.25)
    assert [end.exit_code for end in _of_kind(first, "exit")] == [0]


def test_a_resumed_run_goes_on_under_its_id_with_the_steps_that_are_new(folder: Path) -> None:
    first, second = _runs(folder)
    ids = [_of_kind(records, "run")[0].run_id for records in (first, second)]
    assert ids[0] == ids[1] == (folder / "trackers" / "wandb-id").read_text().strip()
    assert _curve(second, "actor/pg_loss") == [(4, 40.0), (5, 50.0)]


def test_without_an_api_key_the_run_goes_on_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    log_steps(tracked_config(tmp_path / "out", "wandb", "jsonl"), range(1, 3))
    said = capsys.readouterr().out
    assert "wandb did not take the metrics of step 1 (RuntimeError: there is no API key" in said
    assert "set observe.wandb_mode to offline" in said
    assert "wandb is without 2 logging(s)" in said
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
