"""`launch/submit.py` fills in a template, asks the preflight, and submits nothing that cannot run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import LIMIT_S, ROOT
from tests.planning.model_configs import LLAMA_70B, write_model

SLURM = ROOT / "launch" / "slurm"
SCRIPTS = sorted([*SLURM.glob("*.sbatch"), *SLURM.glob("*.sh"), *(ROOT / "tests" / "slurm").glob("*.sh")])

# What sbatch is given, in a file beside it; it answers as on a cluster of several.
SBATCH = "#!/bin/sh\necho \"$@\" > {folder}/arguments\ncat > {folder}/script\necho '4711;cluster'\n"
REFUSING_SBATCH = "#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n"


def submit(*arguments: object, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if path is None else {**os.environ, "PATH": path}
    command = [sys.executable, ROOT / "launch" / "submit.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT, env=environment)


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    """Options of a run that can work, whose files exist."""
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).touch()
    files = [f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/test.parquet"]
    model = write_model(tmp_path, LLAMA_70B)
    return ["--config", "70b_grpo.yaml", "--nodes", "8", f"model.path={model}", *files]


def with_sbatch(folder: Path, text: str) -> str:
    """A PATH on which sbatch is the given program."""
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(text.format(folder=folder))
    program.chmod(0o755)
    return f"{program.parent}:/usr/bin:/bin"


def test_a_dry_run_prints_a_script_with_everything_filled_in(run: list[str]) -> None:
    options = [
        "--partition",
        "gpu",
        "--time",
        "2-00:00:00",
        "--sbatch",
        "qos=high",
        "--container-image",
        "my image.sqsh",
    ]
    result = submit(*run, *options, "--stop-seconds", 3000, "--dry-run", "optim.lr=2e-6")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    header = {line for line in lines if line.startswith("#SBATCH")}
    for option in ("job-name=70b_grpo", "nodes=8", "gpus-per-node=8", "partition=gpu", "time=2-00:00:00", "qos=high"):
        assert f"#SBATCH --{option}" in header
    assert {"#SBATCH --signal=B:USR1@3000", "#SBATCH --requeue", "#SBATCH --open-mode=append"} < header
    assert {"CONFIG=70b_grpo.yaml", "STOP_TIMEOUT_S=3000", "CONTAINER_IMAGE='my image.sqsh'"} < set(lines)
    assert "optim.lr=2e-6" in lines[-1]
    assert subprocess.run(["bash", "-n"], input=result.stdout, text=True).returncode == 0
    assert "preflight: " in result.stderr
    assert "GiB on the worst rank" in result.stderr


def test_the_number_of_the_job_alone_is_on_stdout(run: list[str], tmp_path: Path) -> None:
    result = submit(*run, path=with_sbatch(tmp_path, SBATCH))
    assert (result.returncode, result.stdout) == (0, "4711\n"), result.stderr
    assert (tmp_path / "arguments").read_text() == "--parsable\n"
    assert (tmp_path / "script").read_text() == submit(*run, "--dry-run").stdout


def test_what_sbatch_says_is_passed_on(run: list[str], tmp_path: Path) -> None:
    result = submit(*run, path=with_sbatch(tmp_path, REFUSING_SBATCH))
    assert (result.returncode, result.stdout) == (1, "")
    assert "invalid partition specified: gpu" in result.stderr
    assert "- Slurm did not take the job (see above)." in result.stderr


def test_a_machine_without_slurm_is_named(run: list[str]) -> None:
    result = submit(*run, path="/nowhere")
    assert result.returncode == 1
    assert "sbatch is not on this machine: submit from a login node, or see --dry-run." in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--nodes", "3"], "does not divide the world size 24"),
        (["--gpu-memory", "40"], "but a GPU has 40 GiB"),
        (["data.train_files=nowhere.parquet"], "nowhere.parquet does not exist"),
        (["--time", "10"], "--time 10 is no longer than --stop-seconds 600"),
        (["--time", ""], "--time '' is no time limit"),
        (["--sbatch", "time=5"], "--sbatch time: give it as --time of submit.py"),
        (["--sbatch", "nodes=99"], "--sbatch nodes: give it as --nodes of submit.py"),
        (["--sbatch", "array=1-3"], "launch/slurm/sweep.sbatch is for arrays"),
        (["--job-name", "a\nrm -r runs"], "job-name 'a\\nrm -r runs' has a line break"),
        (["--venv", "nowhere"], "nowhere/bin/activate does not exist"),
        (["--time", "tomorrow"], "--time 'tomorrow' is no time limit: write e.g. 90 (minutes)"),
    ],
)
def test_what_cannot_run_is_not_submitted(run: list[str], tmp_path: Path, options: list[str], sentence: str) -> None:
    result = submit(*run, *options, path=with_sbatch(tmp_path, SBATCH))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("not submitted:\n- ")
    assert sentence in result.stderr
    assert not (tmp_path / "script").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--nodes", "0"], "argument --nodes: 0 is less than 1"),
        (["--nodes", "two"], "argument --nodes: invalid int value: 'two'"),
        (["--gpu-memory", "nan"], "argument --gpu-memory: nan is no finite number above 0"),
        (["--gpu-memory", "0"], "argument --gpu-memory: 0 is no finite number above 0"),
        (["--max-requeues", "-1"], "argument --max-requeues: -1 is less than 0"),
        (["--stop-seconds", "65536"], "argument --stop-seconds: 65536 is more than 65535"),
    ],
)
def test_a_number_outside_of_its_limits_is_named(run: list[str], options: list[str], sentence: str) -> None:
    result = submit(*run, *options, "--dry-run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith(f"error: {sentence}\n")


def test_a_value_stays_one_value_of_sbatch_whatever_is_in_it(run: list[str]) -> None:
    options = ["--job-name", "o'clock run", "--sbatch", "comment=a;b #c", "--sbatch", "no-kill"]
    lines = submit(*run, *options, "--dry-run").stdout.splitlines()
    # As a shell quotes; so sbatch reads it (see test_jobs.py).
    assert """#SBATCH --job-name='o'"'"'clock run'""" in lines
    assert "#SBATCH --comment='a;b #c'" in lines
    assert "#SBATCH --no-kill" in lines


def test_a_config_that_cannot_be_read_has_status_2() -> None:
    result = submit("--config", "70b_grpo.yaml", "optim.learning_rate=1")
    assert result.returncode == 2
    assert "optim.learning_rate" in result.stderr


def test_a_container_may_have_files_that_the_login_node_lacks(run: list[str], tmp_path: Path) -> None:
    options = ["data.train_files=/data/train.parquet", "--container-image=i.sqsh", "--container-mounts=/lustre:/data"]
    result = submit(*run, *options, path=with_sbatch(tmp_path, SBATCH))
    assert (result.returncode, result.stdout) == (0, "4711\n")
    assert "not on this machine: data.train_files: /data/train.parquet does not exist" in result.stderr


@pytest.mark.parametrize(
    ("limit", "seconds"),
    # The forms that the manual of sbatch lists.
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:30", 5430),
        ("2-12", 216_000),
        ("2-12:30", 217_800),
        ("2-12:30:15", 217_815),
        ("UNLIMITED", float("inf")),
        ("0", float("inf")),
    ],
)
def test_time_limits_are_read_as_slurm_does(limit: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    from batch_script import seconds_of

    assert seconds_of(limit) == seconds


def test_neither_torch_nor_transformers_is_imported(run: list[str]) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'launch')!r})\n"
        f"sys.argv = ['submit.py', *{run!r}, '--dry-run']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'launch' / 'submit.py')!r}, run_name='__main__')\n"
        "finally:\n"
        "    print('HEAVY', sorted({'torch', 'transformers', 'megatron'} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert result.stderr.endswith("HEAVY []\n"), result.stderr


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck")
    assert program is not None, "shellcheck is of the extra dev: pip install -e '.[dev]'"
    result = subprocess.run([program, "--external-sources", *SCRIPTS], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
