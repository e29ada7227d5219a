"""Checkpoints that are still being written when something happens to their run: what it does is the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megarl.checkpoint.retention import checkpoints_of
from megarl.checkpoint.training import CheckpointWrite
from megarl.trainers import supervised
from megarl.trainers.preemption import Preempted
from tests.spawn import run_ranks
from tests.trainers.outcomes import outcomes
from tests.trainers.test_exact_resume import make_sft
from tests.trainers.tiny_run import read_metrics

SAVING = ["trainer.save_freq=2", "trainer.total_training_steps=6", "optim.lr_decay_style=linear"]
LATE = "metric: training/epoch, above: 2.5"  # step 4: two thirds of an epoch a step
RUNS = {
    "back": [*SAVING, f"guard.rules=[{{{LATE}, action: rollback}}]", "guard.max_rollbacks=1"],
    "back with slow saves": [
        *SAVING,
        f"guard.rules=[{{{LATE}, action: rollback}}]",
        "guard.max_rollbacks=1",
        "checkpoint.async_save=true",
    ],
    "stopped": [*SAVING, f"guard.rules=[{{{LATE}, action: stop}}]", "checkpoint.async_save=true"],
}
PREEMPTED = [
    *SAVING,
    "trainer.test_freq=2",
    "checkpoint.keep_last=1",
    "checkpoint.keep_best=1",
    "checkpoint.best_metric=val/loss",
]


def run_all(config: str, folder: Path) -> dict[str, str]:
    """How the runs end whose saves are never done by themselves, and one that is asked to stop after a step."""
    CheckpointWrite.is_written = lambda self: False  # type: ignore[method-assign]
    found = outcomes(Path(config), folder, RUNS)
    supervised.agreed_request = lambda: signal.SIGTERM
    try:
        found |= outcomes(Path(config), folder, {"preempted": PREEMPTED})
    except Preempted as preempted:
        found["preempted"] = str(preempted)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("slow")
    (ends,) = run_ranks(run_all, 1, make_sft(folder / "sft"), folder)
    return folder, ends


def without_times(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in line.items() if not name.startswith(("timing_s/", "perf/"))}
        for line in read_metrics(folder)
    ]


def test_a_run_goes_back_to_a_checkpoint_that_is_still_being_written(found: tuple[Path, dict]) -> None:
    folder, ends = found
    assert [line["step"] for line in read_metrics(folder / "back")] == [1, 2, 3, 4, 3, 4]
    assert without_times(folder / "back with slow saves") == without_times(folder / "back")
    assert ends["back with slow saves"] == ends["back"]


def test_steps_that_are_taken_again_have_the_rates_that_they_had(found: tuple[Path, dict]) -> None:
    folder, _ = found
    rates = [line["train/lr"] for line in read_metrics(folder / "back")]
    assert rates[2] > rates[3] > 0
    assert rates[4:] == rates[2:4]


def test_a_guard_that_ends_the_run_costs_no_checkpoint(found: tuple[Path, dict]) -> None:
    folder, ends = found
    assert "guard.rules[0] ends the run at step 4" in ends["stopped"]
    assert list(checkpoints_of(folder / "stopped")) == [2]


def test_a_run_that_is_asked_to_stop_between_two_evaluations_is_no_mistake(found: tuple[Path, dict]) -> None:
    folder, ends = found
    assert ends["preempted"].startswith("stopped after step 1 on SIGTERM")
    assert list(checkpoints_of(folder / "preempted")) == [1]
