"""Traces of chosen steps and ranks, read back as a viewer would."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megarl.config import RunConfig
from megarl.observe import StepProfiler, Timers
from megarl.observe.failure import place_of
from megarl.platform import usage
from megarl.platform.device import Platform


def _config(folder: Path, steps: list[int], ranks: list[int]) -> RunConfig:
    config = RunConfig()
    config.trainer.default_local_dir = str(folder)
    config.observe.profile.steps, config.observe.profile.ranks = steps, ranks
    return config


def _run_steps(config: RunConfig, rank: int, steps: range) -> None:
    profiler, timers = StepProfiler(config, rank), Timers()
    for step in steps:
        with profiler.step(step), timers("step"), timers("update_actor"):
            torch.ones(8, 8) @ torch.ones(8, 8)


def test_a_trace_of_each_chosen_step_has_the_phases_and_the_operations_in_them(tmp_path: Path) -> None:
    _run_steps(_config(tmp_path, [2, 4], [0, 3]), 3, range(1, 6))
    files = sorted(file.name for file in (tmp_path / "profile").iterdir())
    assert files == ["step-000002-rank-00003.json.gz", "step-000004-rank-00003.json.gz"]
    with gzip.open(tmp_path / "profile" / files[0], "rt") as stream:
        events = json.load(stream)["traceEvents"]
    spans = {event["name"]: event for event in events if event.get("ph") == "X"}
    phase, product = spans["update_actor"], spans["aten::mm"]
    assert phase["ts"] <= product["ts"] and product["ts"] + product["dur"] <= phase["ts"] + phase["dur"]
    assert product["args"]["Input Dims"][:2] == [[8, 8], [8, 8]]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    _run_steps(_config(tmp_path, [2], [1]), 0, range(1, 3))
    assert list(tmp_path.iterdir()) == []


def test_traces_go_to_a_folder_of_their_own_where_one_is_named(tmp_path: Path) -> None:
    config = _config(tmp_path / "run", [1], [0])
    config.observe.profile.dir = str(tmp_path / "traces")
    _run_steps(config, 0, range(1, 2))
    assert [file.name for file in tmp_path.rglob("*.gz")] == ["step-000001-rank-00000.json.gz"]
    assert not (tmp_path / "run").exists()


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    _run_steps(_config(tmp_path / "file", [1], [0]), 0, range(1, 2))
    assert "the trace of step 1 was not written" in capsys.readouterr().out


def test_an_exception_knows_its_step_and_its_phases(tmp_path: Path) -> None:
    profiler, timers = StepProfiler(_config(tmp_path, [], [0]), 0), Timers()
    with (
        pytest.raises(RuntimeError) as found,
        profiler.step(7),
        timers("step"),
        timers("update_actor"),
    ):
        raise RuntimeError("no")
    place = place_of(found.value)
    assert (place.step, place.phases) == (7, ("step", "update_actor"))
    assert f"it failed{place.describe()}" == "it failed in update_actor of step 7"


def test_on_a_gpu_each_phase_is_an_nvtx_range_also_when_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []
    gpu = Platform(kind="cuda", collective_backend="nccl", layer_backend="torch", device="cuda:0")
    monkeypatch.setattr(usage, "current", lambda: gpu)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    timers = Timers(synchronize=False)
    with timers("step"), pytest.raises(ZeroDivisionError), timers("gen"):
        raise ZeroDivisionError
    assert ranges == ["step", "gen", "end", "end"]
