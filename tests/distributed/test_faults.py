"""A rank that is stopped, killed or fails: the others say which it was and where, and end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.fault_ranks import LIMIT_S
from tests.launch import ROOT, environment
from tests.trainers.tiny_run import make_tiny_run

PHASES = (
    "gen",
    "exchange",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "sync",
    "save_checkpoint",
)
KILLED_IN = ("gen", "update_actor", "save_checkpoint")
STEP = 2
STOPPED, KILLED = 1, 0
"""Ranks; rank 0 is the one that writes metrics and holds the lock of the folder."""

NO_FAULT = {"action": "stop", "rank": 0, "phase": "no such phase", "step": STEP}
CASES = {
    **{f"stop-{phase}": {"action": "stop", "rank": STOPPED, "phase": phase, "step": STEP} for phase in PHASES},
    **{f"kill-{phase}": {"action": "kill", "rank": KILLED, "phase": phase, "step": STEP} for phase in KILLED_IN},
    "busy": {"action": "never_end", "rank": STOPPED, "phase": "gen", "step": STEP},
    "error": {"action": "divide", "rank": STOPPED, "phase": "update_actor", "step": STEP},
    "mistake": {**NO_FAULT, "overrides": ["trainer.resume_mode=path", "trainer.resume_from_path=/nowhere/step-000001"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    config = make_tiny_run(
        folder,
        critic={"optim": {"lr": 1e-3, "eps": 1e-4}},
        algorithm={"adv_estimator": "gae", "use_kl_in_reward": True},
        trainer={"total_training_steps": 3, "save_freq": 1, "val_before_train": False, "logger": ["jsonl"]},
        # Far longer than a healthy rank waits for another where ten of them share two cores.
        observe={"hang_timeout_s": 20, "peak_tflops": 0.1},
    )
    command = [sys.executable, "tests/distributed/fault_ranks.py", str(config), str(folder), json.dumps(CASES)]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=4 * LIMIT_S)
    assert result.returncode == 0, result.stderr
    return folder


def statuses(folder: Path, case: str) -> list[int]:
    return json.loads((folder / "statuses.json").read_text())[case]


def output(folder: Path, case: str, rank: int) -> str:
    return (folder / case / f"rank-{rank}.txt").read_text()


def report(folder: Path, case: str) -> str:
    (file,) = (folder / case / "out").glob("hang-*.txt")
    return file.read_text()


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_stopped_is_named_with_its_phase(folder: Path, phase: str) -> None:
    case = f"stop-{phase}"
    # The others do not leave the stopped rank behind.
    assert statuses(folder, case) == [1, -signal.SIGKILL]
    (line,) = [line for line in output(folder, case, 0).splitlines() if line.startswith("rank 0: ")]
    assert "the run hangs: rank 0 has waited " in line
    assert f"does not answer, and was last seen in {phase} of step {STEP}" in line
    assert line.partition("; ")[2].startswith(f"rank {STOPPED} (process ")
    assert str(folder / case / "out" / "hang-") in line
    text = report(folder, case)
    assert f"rank {STOPPED} (process " in text.partition("No answer")[2].partition("Waiting:")[0]
    assert "megarl/trainers/" in text.partition("thread MainThread:")[2]


def test_a_rank_that_is_busy_is_named_and_shows_where(folder: Path) -> None:
    assert statuses(folder, "busy") == [1, 1]
    assert f"rank {STOPPED} (process" in report(folder, "busy").partition("Busy, in no collective:")[2]
    assert "in never_end" in report(folder, "busy")
    for rank in (0, STOPPED):
        (line,) = [line for line in output(folder, "busy", rank).splitlines() if line.startswith(f"rank {rank}: ")]
        assert f"is not there, but in gen of step {STEP}" in line


@pytest.mark.parametrize("phase", KILLED_IN)
def test_after_a_kill_the_others_end_with_one_sentence(folder: Path, phase: str) -> None:
    case = f"kill-{phase}"
    assert statuses(folder, case) == [-signal.SIGKILL, 1]
    assert "Traceback" not in output(folder, case, 1)
    (line,) = [line for line in output(folder, case, 1).splitlines() if line.startswith("rank 1: ")]
    assert line.startswith("rank 1: ends in ") and f" of step {STEP}" in line
    assert f"since rank {KILLED} (process " in line
    assert f"is gone, killed or crashed; it was last seen in {phase} of step {STEP}" in line


def test_an_error_shows_its_traceback_once(folder: Path) -> None:
    assert statuses(folder, "error") == [1, 1]
    failed = output(folder, "error", STOPPED)
    assert f"rank {STOPPED}: failed in update_actor of step {STEP}:\nTraceback" in failed
    assert "ZeroDivisionError: a test divides by zero" in failed
    other = output(folder, "error", 0)
    assert "Traceback" not in other
    reason = f"since rank {STOPPED}: failed in update_actor of step {STEP} (ZeroDivisionError: a test divides by zero)"
    assert reason in other


def test_a_mistake_of_a_person_is_a_sentence_of_its_own_on_each_rank(folder: Path) -> None:
    assert statuses(folder, "mistake") == [2, 2]
    for rank in range(2):
        assert "/nowhere/step-000001" in output(folder, "mistake", rank)
        assert "Traceback" not in output(folder, "mistake", rank)
