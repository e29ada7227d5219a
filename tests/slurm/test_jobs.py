"""Jobs from the templates on a real Slurm of two nodes: they end, are stopped and go on, and survive a node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import LIMIT_S, ROOT
from tests.slurm.cluster import Cluster, missing_reason, processes_that_know, running_cluster
from tests.trainers.tiny_run import make_tiny_run, read_metrics

pytestmark = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))

STEPS = 20
GATED_REWARD = """
import json, time
from pathlib import Path

FOLDER = Path({folder!r})

def steps_done():
    file = FOLDER / "disturbed" / "metrics.jsonl"
    whole, _, _ = file.read_text().rpartition("\\n") if file.exists() else ("", "", "")
    return max([json.loads(line)["step"] for line in whole.splitlines()], default=0)

def may_go_on():
    try:
        return steps_done() < int((FOLDER / "last-step").read_text())
    except FileNotFoundError:  # there is no last step
        return True

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while not may_go_on():
        time.sleep(0.1)
    return sum(map(ord, solution_str)) % 17 / 16.0
"""
REASON = "power supply is dead"


@dataclass(frozen=True, kw_only=True)
class Job:
    number: str
    log: Path
    out: Path

    def steps(self) -> list[int]:
        """Those whose metrics are written."""
        return [line["step"] for line in read_metrics(self.out)] if (self.out / "metrics.jsonl").exists() else []

    def says(self, text: str) -> bool:
        return self.log.exists() and text in self.log.read_text()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        # What a person would export for nodes that are one machine without GPUs.
        cluster.environment |= {
            "VENV": sys.prefix,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "LOCAL_ADDR": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    make_tiny_run(
        folder,
        trainer={"logger": ["jsonl"], "val_before_train": False, "total_epochs": 100, "total_training_steps": STEPS},
        actor={"ppo_mini_batch_size": 4},
        reward={"custom": {"path": str(folder / "reward.py")}, "num_workers": 1, "timeout_s": 2 * LIMIT_S},
    )
    (folder / "reward.py").write_text(GATED_REWARD.format(folder=str(folder)))
    return folder


def stop_in_the_rollout_after(folder: Path, step: int) -> None:
    """The disturbed run waits there, until it is told another step: whatever happens to it happens there."""
    (folder / "next").write_text(str(step))
    (folder / "next").rename(folder / "last-step")


@pytest.fixture(scope="module")
def whole(cluster: Cluster, folder: Path) -> Job:
    """A job of the plain template that nobody disturbs."""
    options = ["--parsable", "--nodes=2", "--gpus-per-node=0", "--time=60", f"--output={folder}/whole.log"]
    settings = f"ALL,CONFIG={folder}/run.yaml,RANKS_PER_NODE=1,MEGARL_ROOT={ROOT}"
    template = ROOT / "launch" / "slurm" / "train.sbatch"
    out = folder / "whole"
    number = cluster.command(
        "sbatch", *options, f"--export={settings}", template, f"trainer.default_local_dir={out}", cwd=folder
    )
    job = Job(number=number.strip(), log=folder / "whole.log", out=out)
    cluster.wait("the end", lambda: cluster.job_state(job.number) == "COMPLETED", job.number)
    return job


@pytest.fixture(scope="module")
def disturbed(cluster: Cluster, folder: Path) -> Job:
    """The same run from launch/submit.py: a rank is killed; when it goes on, it is stopped; then a node of it fails."""
    out, log = folder / "disturbed", folder / "disturbed.log"
    options = [f"--config={folder}/run.yaml", "--nodes=2", "--gpus-per-node=1", "--gpu=none", f"--venv={sys.prefix}"]
    options += ["--time=60", "--stop-seconds=600", f"--sbatch=output={log}"]
    settings = [f"trainer.default_local_dir={out}", "trainer.save_freq=2"]
    stop_in_the_rollout_after(folder, 3)
    submitted = subprocess.run(
        [sys.executable, ROOT / "launch" / "submit.py", *options, *settings],
        env=cluster.environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert submitted.returncode == 0, submitted.stderr
    job = Job(number=submitted.stdout.strip(), log=log, out=out)
    cluster.wait("the third step", lambda: 3 in job.steps(), job.number)
    for rank in processes_that_know(str(cluster.folder), "\0RANK=1\0", "launch/train.py"):
        os.kill(rank, signal.SIGKILL)
    stop_in_the_rollout_after(folder, 5)
    cluster.wait("steps of the second try", lambda: job.says("started again") and 5 in job.steps(), job.number)
    # What Slurm does at the end of the time, or to preempt (`--signal=B:USR1@60`).
    cluster.command("scancel", "--batch", "--signal=USR1", job.number)
    cluster.wait("the answer", lambda: job.says("SIGUSR1: the run ends after this step"), job.number)
    stop_in_the_rollout_after(folder, 9)
    cluster.wait("steps of the second start", lambda: job.says("start 2") and 9 in job.steps(), job.number)
    cluster.command("scontrol", "update", "nodename=n2", "state=down", f"reason={REASON}")
    # slurmd still answers, so Slurm takes the node back by itself (ReturnToService).
    cluster.wait("the third start", lambda: job.says("start 3"), job.number)
    (folder / "last-step").unlink()
    cluster.wait("the end", lambda: cluster.job_state(job.number) == "COMPLETED", job.number)
    return job


def test_a_job_on_two_nodes_runs_to_its_end(whole: Job) -> None:
    assert whole.steps() == list(range(1, STEPS + 1))
    assert (whole.out / "hf" / "model.safetensors").exists()
    assert whole.says("start 1, on n[1-2]")


def test_the_name_of_a_job_may_have_spaces_and_quotes(cluster: Cluster, folder: Path) -> None:
    config = folder / "o'clock run.yaml"
    config.write_bytes((folder / "run.yaml").read_bytes())
    options = [f"--config={config}", "--gpus-per-node=1", "--gpu=none", f"--sbatch=output={folder}/never.log"]
    command = [sys.executable, ROOT / "launch" / "submit.py", *options, "--sbatch=begin=now+1hour"]
    result = subprocess.run(command, env=cluster.environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    job = result.stdout.strip()
    assert f"JobName={config.stem}\n" in cluster.command("scontrol", "show", "job", job)
    cluster.command("scancel", job)


def test_when_a_rank_is_killed_all_start_again_in_the_same_job(disturbed: Job) -> None:
    first, _, _ = disturbed.log.read_text().partition("start 2, on")
    _, again, second = first.partition("(status 128): it is started again, 1 of at most 3 times")
    assert again
    assert "resumed after step 2" in second


def test_a_signal_in_mid_run_saves_and_requeues_the_job_which_goes_on(disturbed: Job) -> None:
    log = disturbed.log.read_text()
    stopped, _, rest = log.partition("on SIGUSR1; the same command goes on from there")
    assert int(stopped.rsplit("stopped after step ", 1)[1]) == 6
    assert "stopped on request and goes back into the queue" in rest
    assert "resumed after step 6" in rest


def test_the_failure_of_a_node_is_named_and_the_requeued_job_goes_on(disturbed: Job) -> None:
    _, _, second = disturbed.log.read_text().partition("start 2, on")
    failed, _, third = second.partition("start 3, on")
    assert "Node failure on n2" in failed
    assert "DUE TO NODE FAILURE" in failed
    assert "resumed after step 8" in third


def test_what_was_interrupted_three_times_ends_with_the_weights_of_what_was_not(whole: Job, disturbed: Job) -> None:
    assert disturbed.steps() == list(range(1, STEPS + 1))
    expected = load_file(whole.out / "hf" / "model.safetensors")
    found = load_file(disturbed.out / "hf" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
