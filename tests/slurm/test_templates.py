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
echo "$RENDEZVOUS" > "$FOLDER/rendezvous"
status=$(head -n 1 "$FOLDER/statuses")
sed -i 1d "$FOLDER/statuses"
exit "${status:-0}"
"""
# `scontrol requeue` ends the batch script, as Slurm does.
SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames")
    if [ -n "${BASH_ENV:-}" ]; then kill -USR1 "$(cat "$FOLDER/batch")"; fi
    printf 'n1\\nn2\\n' ;;
"show node") echo "   NodeAddr=${NODE_ADDRESS-10.0.0.$((10#${3#n}))} NodeHostName=$3" ;;
requeue*)
    if [ -n "${SCONTROL_REFUSES:-}" ]; then echo "Job is no longer there" >&2; exit 1; fi
    echo "requeue $2" >> "$FOLDER/requeued"; kill $PPID ;;
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


def test_a_run_of_a_sweep_puts_itself_back_and_no_other(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("optim.lr=1e-6\noptim.lr=2e-6\n")
    # The last task of an array has the job id of the whole array.
    array = {"SLURM_JOB_ID": "12345", "SLURM_ARRAY_JOB_ID": "12345", "SLURM_ARRAY_TASK_ID": "2"}
    run(job | array | {"SWEEP": str(tmp_path / "sweep.txt")}, "sweep.sbatch", statuses="75")
    assert Path(job["FOLDER"], "requeued").read_text() == "requeue 12345_2\n"


def test_a_signal_before_anything_has_started_puts_the_job_back(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "note").write_text('[ -f "$FOLDER/batch" ] || echo $$ > "$FOLDER/batch"\n')
    run(job | {"BASH_ENV": str(tmp_path / "note")}, "train.sbatch", statuses="0")
    assert is_requeued(job)
    assert not (tmp_path / "steps").exists()


def test_a_job_that_slurm_does_not_put_back_says_what_to_do(job: dict[str, str]) -> None:
    result = run(job | {"SCONTROL_REFUSES": "1"}, "train.sbatch", statuses="75")
    assert result.returncode == 75
    assert "Slurm does not requeue job 12345 (see above); submit it again to go on" in result.stderr


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, "10.0.0.1:22345"),
        ({"NODE_ADDRESS": ""}, "n1:22345"),
        ({"NODE_ADDRESS": "fd00::1"}, "[fd00::1]:22345"),
        ({"MASTER_ADDR": "first", "MASTER_PORT": "29500"}, "first:29500"),
    ],
    ids=["an address", "a name", "IPv6", "given"],
)
def test_ranks_meet_at_the_first_node(job: dict[str, str], settings: dict[str, str], place: str) -> None:
    assert run(job | settings, "train.sbatch", statuses="0").returncode == 0
    assert Path(job["FOLDER"], "rendezvous").read_text() == f"{place}\n"


def test_a_job_whose_first_node_nobody_knows_does_not_start(job: dict[str, str]) -> None:
    Path(job["FOLDER"], "bin", "scontrol").write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n"
    )
    result = run(job, "train.sbatch")
    assert result.returncode == 1
    assert "scontrol does not say which node of n[1-2] is the first: set MASTER_ADDR to its address" in result.stderr
    assert not Path(job["FOLDER"], "steps").exists()


@pytest.mark.parametrize("name", ["MAX_RESTARTS", "MAX_REQUEUES", "RANKS_PER_NODE", "STOP_TIMEOUT_S"])
def test_a_count_that_is_no_number_ends_the_job_instead_of_starting_it_for_ever(job: dict[str, str], name: str) -> None:
    result = run(job | {name: "many"}, "train.sbatch", statuses="1 1 1 1 1 1")
    assert result.returncode == 2
    assert f"{name} is 'many', which is no whole number" in result.stderr
    assert not Path(job["FOLDER"], "steps").exists()


@pytest.mark.parametrize("template", ["train.sbatch", "convert.sbatch"])
def test_a_template_that_is_not_in_a_checkout_says_so(job: dict[str, str], template: str) -> None:
    result = run(job | {"SLURM_SUBMIT_DIR": job["FOLDER"]}, template)
    assert result.returncode == 2
    assert "sbatch this from the root of a checkout of megarl, or set MEGARL_ROOT to it" in result.stderr


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
    # As an editor on Windows would write it.
    sweep.write_bytes(b"optim.lr=1e-6\r\noptim.lr=2e-6 actor.clip_ratio_high=0.2\r\n")
    task = job | {"SWEEP": str(sweep), "RUNS": "runs/lr", "SLURM_ARRAY_TASK_ID": "2"}
    assert run(task, "sweep.sbatch", "trainer.seed=3", statuses="0").returncode == 0
    settings = "optim.lr=2e-6 actor.clip_ratio_high=0.2 trainer.default_local_dir=runs/lr/2 trainer.seed=3"
    assert steps(job)[0].endswith(settings)
    result = run(task | {"SLURM_ARRAY_TASK_ID": "3"}, "sweep.sbatch")
    assert result.returncode == 2
    assert "has no line 3: give --array as many numbers as it has lines" in result.stderr
    del task["SLURM_ARRAY_TASK_ID"]
    assert "SLURM_ARRAY_TASK_ID: is not set: give sbatch --array" in run(task, "sweep.sbatch").stderr


def test_a_conversion_that_fails_ends_the_job(job: dict[str, str]) -> None:
    result = run(job | {"HF": "models/a", "OUT": "checkpoints/a"}, "convert.sbatch", statuses="1")
    assert result.returncode == 1
    [step] = steps(job)
    assert step.endswith("hf_to_megatron.py --hf models/a --out checkpoints/a --tp 1 --pp 8 --verify")


def test_a_node_without_megarl_says_so_and_nothing_starts_again(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\necho 'No module named megarl' >&2\nexit 1\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "bin" / "srun").write_text('#!/bin/bash\necho step >> "$FOLDER/steps"\nexec "${@:$#-4}"\n')
    result = run(job | {"VENV": "/nowhere"}, "train.sbatch")
    assert result.returncode == 2
    assert f"megarl is not in {tmp_path}/bin/python: set VENV to an environment that has it" in result.stderr
    assert steps(job) == ["step"]


def test_the_preflight_of_a_job_is_that_of_the_command(job: dict[str, str]) -> None:
    settings = {"CONFIG": "nowhere.yaml", "GPUS": "64", "VENV": sys.prefix}
    result = run(job | settings, "preflight.sbatch")
    assert result.returncode == 2
    assert "config nowhere.yaml was found neither in" in result.stderr
