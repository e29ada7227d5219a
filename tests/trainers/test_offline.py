"""RL on a dataset of responses is RL on the rollouts that they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.launch import LIMIT_S, ROOT, torchrun
from tests.trainers.tiny_run import make_tiny_run, read_metrics

PROGRAM = "tests/trainers/train_in_layouts.py"
CORRECTED = ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=1.0"]
"""At this threshold every ratio above 1 is cut, so that the correction changes weights though the two are close."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run generates; the others train on its rollouts, as a dump and as datasets with and without columns."""
    folder = tmp_path_factory.mktemp("offline")
    config = make_tiny_run(folder)
    rollouts, dataset, bare = folder / "rollouts", folder / "rollouts.parquet", folder / "bare.parquet"
    torchrun(1, PROGRAM, config, folder, json.dumps({"first": [f"trainer.rollout_data_dir={rollouts}"]}))
    tool = [sys.executable, ROOT / "tools" / "data" / "rollouts.py", "--rollouts", rollouts, "--out", dataset]
    subprocess.run([*map(str, tool), "--steps", "1"], check=True, capture_output=True, timeout=LIMIT_S)
    pq.write_table(pq.read_table(dataset).drop_columns(["response_rewards", "response_logprobs"]), bare)
    offline = ["rollout.engine=dataset", "data.shuffle=false"]
    runs = {
        "replay": [f"rollout.replay_dir={rollouts}"],
        "replay corrected": [f"rollout.replay_dir={rollouts}", *CORRECTED],
        "offline": [*offline, f"data.train_files={dataset}"],
        "offline corrected": [*offline, f"data.train_files={dataset}", *CORRECTED],
        "bare": [*offline, f"data.train_files={bare}", "trainer.test_freq=1"],
    }
    torchrun(1, PROGRAM, config, folder, json.dumps(runs))
    torchrun(2, PROGRAM, config, folder, json.dumps({"offline on 2 ranks": runs["offline"]}))
    return folder


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name / "hf" / "model.safetensors")


@pytest.mark.parametrize("suffix", ["", " corrected"])
def test_the_dataset_gives_the_same_weights_as_the_replay(folder: Path, suffix: str) -> None:
    replayed, offline = weights(folder, f"replay{suffix}"), weights(folder, f"offline{suffix}")
    assert replayed.keys() == offline.keys()
    assert all(torch.equal(offline[name], tensor) for name, tensor in replayed.items())


def test_the_step_moves_the_weights_and_the_correction_matters(folder: Path) -> None:
    start = load_file(folder / "model" / "model.safetensors")
    plain, corrected = weights(folder, "offline"), weights(folder, "offline corrected")
    for name, tensor in start.items():
        assert not torch.equal(plain[name], tensor), name
    assert any(not torch.equal(plain[name], corrected[name]) for name in start)


def test_without_rewards_in_the_data_responses_are_scored_as_generated_ones_are(folder: Path) -> None:
    """And nothing but the correction reads log-probs, so the weights are those of the dataset that has them."""
    with_columns, bare = weights(folder, "offline"), weights(folder, "bare")
    assert all(torch.equal(bare[name], tensor) for name, tensor in with_columns.items())
    (expected,), (found,) = read_metrics(folder / "offline"), read_metrics(folder / "bare")
    assert found["critic/score/mean"] == expected["critic/score/mean"]


def test_the_gap_to_an_engine_is_measured_only_where_the_data_has_its_log_probs(folder: Path) -> None:
    gap = ("training/rollout_probs_diff", "training/rollout_kl", "rollout_corr/")
    (with_logprobs,), (bare,) = read_metrics(folder / "offline"), read_metrics(folder / "bare")
    assert any(name.startswith(gap) for name in with_logprobs)
    assert not any(name.startswith(gap) for name in bare)
    assert all(value == value for value in bare.values()), "no metric is NaN"


def test_held_out_prompts_are_answered_by_the_transformers_engine(folder: Path) -> None:
    (bare,) = read_metrics(folder / "bare")
    assert any(name.startswith("val-core/") for name in bare)


def test_the_layout_does_not_change_what_is_learned(folder: Path) -> None:
    expected, found = weights(folder, "offline"), weights(folder, "offline on 2 ranks")
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < 1e-5 * tensor.norm(), name
