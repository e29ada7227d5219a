"""What the templates do with a step that ends in one way or another, and what they run. Slurm is played here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import LIMIT_S, ROOT

SLURM = ROOT / "launch" / "slurm"

# A step ends with the next of the statuses in the file, and leaves its command.
SRUN = """#!/bin/bash
echo "$@" >> "$FOLDER/steps"
status=$(head -n 1 "$FOLDER/statuses")
sed -i 1d "$FOLDER/statuses"
exit "${status:-0}"
"""
# `scontrol requeue` ends the batch script, as Slurm does.
SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") printf 'n1\\nn2\\n' ;;
"show node") echo "   NodeAddr=10.0.0.$((10#${3#n})) NodeHostName=$3" ;;
requeue*) echo "requeue $2" >> "$FOLDER/requeued"; kill $PPID ;;
esac
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {"JOB_ID": "12345", "JOB_NODELIST": "n[1-2]", "NNODES": "2", "SUBMIT_DIR": str(ROOT)}
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "FOLDER": str(tmp_path),
        **{f"SLURM_{name}": value for name, value in slurm.items()},
    }


def run(job: dict[str, str], template: str, *arguments: str, statuses: str = "") -> subprocess.CompletedProcess[str]:
    Path(job["FOLDER"], "statuses").write_text("".join(f"{status}\n" for status in statuses.split()))
    return subprocess.run(
        ["bash", SLURM / template, *arguments], env=job, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )


def steps(job: dict[str, str]) -> list[str]:
    return Path(job["FOLDER"], "steps").read_text().splitlines()


def is_requeued(job: dict[str, str]) -> bool:
    return Path(job["FOLDER"], "requeued").exists()


def test_a_run_that_ends_ends_the_job(job: dict[str, str]) -> None:
    result = run(job | {"CONFIG": "7b_grpo.yaml"}, "train.sbatch", "optim.lr=1e-6", statuses="0")
    assert result.returncode == 0, result.stderr
    assert not is_requeued(job)
    [step] = steps(job)
    assert step.endswith(f"node.sh {ROOT}/launch/train.py --config 7b_grpo.yaml optim.lr=1e-6")
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in step


def test_a_stop_on_request_puts_the_job_back(job: dict[str, str]) -> None:
    result = run(job, "train.sbatch", statuses="75")
    assert Path(job["FOLDER"], "requeued").read_text() == "requeue 12345\n"
    assert "job 12345 stopped on request and goes back into the queue" in result.stdout


def test_a_job_is_not_put_back_for_ever(job: dict[str, str]) -> None:
    result = run(job | {"SLURM_RESTART_COUNT": "2", "MAX_REQUEUES": "2"}, "train.sbatch", statuses="75")
    assert result.returncode == 75
    assert "has been requeued 2 times (MAX_REQUEUES); submit it again to go on" in result.stderr
    assert not is_requeued(job)


@pytest.mark.parametrize(
    ("statuses", "status", "count"),
    [("1 0", 0, 2), ("1 1 128 1", 1, 4), ("2 0", 2, 1)],
    ids=["once", "more often than allowed", "a bad config"],
)
def test_a_failure_starts_the_run_again_unless_that_cannot_help(
    job: dict[str, str], statuses: str, status: int, count: int
) -> None:
    result = run(job | {"MAX_RESTARTS": "3"}, "train.sbatch", statuses=statuses)
    assert (result.returncode, len(steps(job))) == (status, count)
    assert not is_requeued(job)


def test_a_container_sees_the_checkout_and_what_is_mounted(job: dict[str, str]) -> None:
    settings = {"CONTAINER_IMAGE": "/images/megarl.sqsh", "CONTAINER_MOUNTS": "/lustre:/data"}
    run(job | settings, "train.sbatch", statuses="0")
    assert (
        f"--container-image=/images/megarl.sqsh --container-mounts={ROOT}:{ROOT},{ROOT}:{ROOT},/lustre:/data"
        in (steps(job)[0])
    )


def test_each_run_of_a_sweep_has_its_line_and_its_folder(job: dict[str, str], tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.txt"
    sweep.write_text("optim.lr=1e-6\noptim.lr=2e-6 actor.clip_ratio_high=0.2\n")
    task = job | {"SWEEP": str(sweep), "RUNS": "runs/lr", "SLURM_ARRAY_TASK_ID": "2"}
    assert run(task, "sweep.sbatch", "trainer.seed=3", statuses="0").returncode == 0
    settings = "optim.lr=2e-6 actor.clip_ratio_high=0.2 trainer.default_local_dir=runs/lr/2 trainer.seed=3"
    assert steps(job)[0].endswith(settings)
    result = run(task | {"SLURM_ARRAY_TASK_ID": "3"}, "sweep.sbatch")
    assert result.returncode == 2
    assert "has no line 3: give --array as many numbers as it has lines" in result.stderr


def test_a_conversion_that_fails_ends_the_job(job: dict[str, str]) -> None:
    result = run(job | {"HF": "models/a", "OUT": "checkpoints/a"}, "convert.sbatch", statuses="1")
    assert result.returncode == 1
    [step] = steps(job)
    assert step.endswith("hf_to_megatron.py --hf models/a --out checkpoints/a --tp 1 --pp 8 --verify")


def test_the_preflight_of_a_job_is_that_of_the_command(job: dict[str, str]) -> None:
    settings = {"CONFIG": "nowhere.yaml", "GPUS": "64", "VENV": sys.prefix}
    result = run(job | settings, "preflight.sbatch")
    assert result.returncode == 2
    assert "config nowhere.yaml was found neither in" in result.stderr
