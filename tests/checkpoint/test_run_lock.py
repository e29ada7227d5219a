"""One run at a time in a folder: the second is refused, and what a dead one left behind is taken over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.checkpoint.run_lock import LOCK_NAME, RunLock
from megarl.config import ConfigError

HOLDER = """
import sys, time
from megarl.checkpoint.run_lock import RunLock
lock = RunLock(sys.argv[1])
print(lock.acquire(), flush=True)
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "None\n"
    yield process
    process.kill()
    process.wait()


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        RunLock(folder).acquire()
    (sentence,) = raised.value.problems
    assert sentence.endswith(".") and "\n" not in sentence
    return sentence


def edit_owner(folder: Path, **changes: object) -> None:
    file = folder / LOCK_NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_a_second_run_is_refused_and_told_who_has_the_folder(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    sentence = refusal(tmp_path)
    assert f"process {holder.pid}" in sentence and str(tmp_path) in sentence
    assert "wait for its end, or name another folder" in sentence


def test_a_refused_run_does_not_take_the_name_of_the_owner_away(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    assert refusal(tmp_path) == refusal(tmp_path)


def test_what_a_killed_run_left_is_taken_over_and_said(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    kill(holder)
    note = RunLock(tmp_path).acquire()
    assert note is not None and f"process {holder.pid}" in note


def test_a_lock_of_another_host_says_which_file_to_remove(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    kill(holder)
    edit_owner(tmp_path, host="node-7")
    sentence = refusal(tmp_path)
    assert "node-7" in sentence and f"remove {tmp_path / LOCK_NAME}" in sentence


def test_a_requeued_job_goes_on_from_another_host(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(holder)
    edit_owner(tmp_path, host="node-7", job="SLURM_JOB_ID=123")
    monkeypatch.setenv("SLURM_JOB_ID", "124")
    refusal(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    assert RunLock(tmp_path).acquire() is not None


def test_a_lock_that_was_released_is_free_and_leaves_no_name(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
    assert (tmp_path / LOCK_NAME).read_text() == ""
    process = subprocess.run(
        [sys.executable, "-c", HOLDER.replace("time.sleep(3600)", ""), str(tmp_path)], capture_output=True, text=True
    )
    assert process.stdout == "None\n", process.stderr


def test_where_the_file_system_has_no_locks_the_process_is_looked_for(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.checkpoint.run_lock._lock", lambda descriptor: None)
    assert "in use by" in refusal(tmp_path)
    kill(holder)
    assert RunLock(tmp_path).acquire() is not None


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(tmp_path / "file")
