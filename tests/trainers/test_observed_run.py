"""A run that traces a step and then runs out of memory, started as a person would."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from tests.launch import torchrun
from tests.trainers.tiny_run import make_tiny_run, read_metrics

HUNGRY = """
import itertools
import os

import torch

from megarl.algorithms.policy_loss import policy_loss
from megarl.algorithms.tokens import TokenLoss

steps = itertools.count(1)  # one micro-batch a step


@policy_loss("hungry")
def hungry(inputs, options):
    scratch = torch.zeros(64, 2**18)
    if next(steps) == 2 and os.environ["RANK"] == "1":  # the other rank cannot end before it
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return TokenLoss(loss=-inputs.advantages * inputs.logprobs * inputs.mask)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("observed")


@pytest.fixture(scope="module")
def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """Two ranks; rank 1 traces step 1, and runs out of memory in step 2."""
    (folder / "hungry.py").write_text(HUNGRY)
    config = make_tiny_run(
        folder,
        algorithm={"plugins": [str(folder / "hungry.py")]},
        actor={"policy_loss": "hungry", "ppo_mini_batch_size": 4, "max_tokens_per_micro_batch": 1024},
        observe={"peak_tflops": 0.1, "profile": {"steps": [1], "ranks": [1]}},
        trainer={
            "default_local_dir": str(folder / "out"),
            "total_training_steps": 3,
            "val_before_train": False,
            "logger": ["console", "jsonl"],
        },
    )
    return torchrun(2, "launch/train.py", "--config", config, check=False)


def test_the_chosen_step_and_rank_are_traced_with_their_phases(
    folder: Path, run: subprocess.CompletedProcess[str]
) -> None:
    (file,) = (folder / "out" / "profile").iterdir()
    assert file.name == "step-000001-rank-00001.json.gz"
    with gzip.open(file, "rt") as stream:
        spans = {event["name"] for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"}
    assert {"step", "gen", "exchange", "update_actor", "sync"} <= spans
    assert [line["step"] for line in read_metrics(folder / "out")] == [1]


def test_out_of_memory_is_one_sentence_with_phase_tensor_and_key_and_a_report(
    folder: Path, run: subprocess.CompletedProcess[str]
) -> None:
    assert run.returncode != 0
    (sentence,) = [line for line in run.stderr.splitlines() if line.startswith("rank 1: out of memory")]
    assert "out of memory in update_actor of step 2; largest tensors are scratch in hungry (hungry.py:17)" in sentence
    assert "[64, 262144] float32, 64.00 MiB" in sentence
    assert "lower actor.max_tokens_per_micro_batch (now 1024)" in sentence
    report = (folder / "out" / "out-of-memory" / "rank-00001.txt").read_text()
    assert "phases: step / update_actor" in report
    assert "set model.recompute_granularity to full" in report
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB." in report
    assert "rank 1 failed" not in run.stderr, "a traceback belongs into the report"
