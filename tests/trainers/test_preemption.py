"""A run that is asked to stop saves itself, says so by its exit status, and goes on when it is started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.processes.stop_signals import EXIT_PREEMPTED
from tests.launch import LIMIT_S, ROOT
from tests.processes.test_parent import ends
from tests.trainers.tiny_pairs import make_tiny_pairs
from tests.trainers.tiny_run import make_tiny_run, read_metrics

ENDLESS = {"total_epochs": 10_000, "total_training_steps": 10_000, "logger": ["jsonl"], "stop_grace_s": LIMIT_S}
ALONE = [sys.executable, "launch/train.py"]
AGENT = [sys.executable, "launch/slurm/agent.py", "--standalone", "--max-restarts=1", f"--shutdown-timeout={LIMIT_S:g}"]
UNDER_AGENT = [*AGENT, "--nproc-per-node=1", "launch/train.py"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_tiny_run(tmp_path, trainer=ENDLESS)


@contextmanager
def running(command: list[str], config: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run of its own session, which is killed at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, "--config", str(config), *overrides],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def last_step(config: Path) -> int:
    metrics = config.parent / "out" / "metrics.jsonl"
    lines = read_metrics(metrics.parent) if metrics.exists() else []
    return lines[-1]["step"] if lines else 0


def checkpoints(config: Path) -> list[str]:
    return sorted(file.name for file in (config.parent / "out").glob("checkpoints/step-*"))


@pytest.mark.parametrize(
    ("kind", "number"), [("rl", signal.SIGUSR1), ("rl", signal.SIGTERM), ("reward_model", signal.SIGUSR1)]
)
def test_a_stopped_run_goes_on_after_its_last_step(tmp_path: Path, kind: str, number: signal.Signals) -> None:
    make = make_tiny_run if kind == "rl" else make_tiny_pairs
    config = make(tmp_path, trainer={**ENDLESS, "kind": kind, "save_freq": -1})
    with running(ALONE, config) as process:
        wait_for(lambda: last_step(config) >= 2, process)
        for pid in (process.pid, *descendants(process.pid)):  # as Slurm does
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        assert process.wait(LIMIT_S) == EXIT_PREEMPTED
        step = last_step(config)
        assert f"stopped after step {step} on {number.name}" in process.stderr.read()
    assert checkpoints(config) == [f"step-{step:06d}"]
    with running(ALONE, config, f"trainer.total_training_steps={step + 1}") as process:
        assert process.wait(LIMIT_S) == 0
    assert [line["step"] for line in read_metrics(tmp_path / "out")] == list(range(1, step + 2))


def test_a_signal_before_the_first_step_ends_a_run_that_has_nothing_to_save(config: Path) -> None:
    with running(ALONE, config) as process:
        wait_for(lambda: catches(process.pid, signal.SIGUSR1), process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == EXIT_PREEMPTED
        assert "stopped after step 0" in process.stderr.read()
    assert checkpoints(config) == []


def test_torchrun_of_a_slurm_job_has_the_status_of_its_ranks_and_starts_none_again(config: Path) -> None:
    with running(UNDER_AGENT, config) as process:
        wait_for(lambda: last_step(config) >= 2, process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == EXIT_PREEMPTED
    assert checkpoints(config) == [f"step-{last_step(config):06d}"]


def test_torchrun_of_a_slurm_job_can_be_stopped_before_it_has_ranks(config: Path) -> None:
    with running(UNDER_AGENT, config) as process:
        wait_for(lambda: catches(process.pid, signal.SIGUSR1), process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == EXIT_PREEMPTED


def test_ranks_and_reward_workers_die_with_a_torchrun_that_is_killed(config: Path) -> None:
    with running(UNDER_AGENT, config) as process:
        wait_for(lambda: last_step(config) >= 1, process)
        others = descendants(process.pid)
        process.kill()
        assert len(others) >= 2  # a rank, and its reward worker
        assert [ends(pid) for pid in others] == [True] * len(others)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def descendants(pid: int) -> list[int]:
    """Children of all threads of a process, and theirs: the reward workers are those of a thread."""
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # threads come and go
            children += map(int, file.read_text(encoding="utf-8").split())
    return [process for child in children for process in (child, *descendants(child))]
