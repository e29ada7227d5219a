"""GRPO of mixtures of experts: steps on the same rollouts give the same model when experts are shared out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launch import torchrun
from tests.trainers.tiny_run import make_tiny_run, read_metrics

TOLERANCE = 1e-5
EP = "parallel.expert_model_parallel_size=2"
TP = "parallel.tensor_model_parallel_size=2"
ETP = "parallel.expert_tensor_parallel_size=1"
BIAS_RATE = 1e-3
FAMILIES = ("qwen3_moe", "deepseek_v3")
REPLAYED = {"EP2": [EP], "TP2 EP2": [TP, EP, ETP]}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process generates in two steps, others train on its rollouts, and one in EP2 generates its own.

    `resumed` goes on in one process from what EP2 saved after the first step.
    """
    folder = tmp_path_factory.mktemp(request.param)
    # Every synchronisation compares checksums of what the ranks send with those of what the engine holds.
    rollout = {"check_weight_sync": True}
    actor = {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "max_tokens_per_micro_batch": 128}
    model = {"moe_router_bias_update_rate": BIAS_RATE if request.param == "deepseek_v3" else 0.0}
    trainer = {
        "default_local_dir": str(folder / "out"),
        "total_training_steps": 2,
        "val_before_train": False,
        "logger": ["jsonl"],
    }
    config = make_tiny_run(folder, family=request.param, model=model, actor=actor, rollout=rollout, trainer=trainer)
    replay = f"rollout.replay_dir={folder / 'rollouts'}"
    one = {"one": [f"trainer.rollout_data_dir={folder / 'rollouts'}"]}
    two = {name: [*sizes, replay, "trainer.save_freq=1"] for name, sizes in REPLAYED.items()}
    for ranks, runs in ((1, one), (2, two | {"EP2 generates": [EP]}), (1, {"resumed": [replay]})):
        if "resumed" in runs:
            checkpoint = Path("checkpoints", "step-000001")
            shutil.copytree(folder / "EP2" / checkpoint, folder / "resumed" / checkpoint)
        torchrun(ranks, "tests/trainers/train_in_layouts.py", config, folder, json.dumps(runs), timeout=280)
    return folder


@pytest.mark.parametrize("layout", [*REPLAYED, "resumed"])
def test_replayed_steps_give_the_same_weights(folder: Path, layout: str) -> None:
    expected = load_file(folder / "one" / "hf" / "model.safetensors")
    found = load_file(folder / layout / "hf" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < TOLERANCE * tensor.norm(), name
    assert [line["step"] for line in read_metrics(folder / layout)] == ([2] if layout == "resumed" else [1, 2])


def test_the_steps_moved_every_expert_and_router_far_more_than_the_tolerance(folder: Path) -> None:
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "one" / "hf" / "model.safetensors")
    moved = {name: ((after[name] - t).norm() / t.norm().clamp(min=1e-3)).item() for name, t in before.items()}
    assert min(moved.values()) > 20 * TOLERANCE, min(moved, key=moved.__getitem__)


@pytest.mark.parametrize("run", ["one", "EP2 generates"])
def test_the_engine_has_the_experts_that_the_ranks_trained(folder: Path, run: str) -> None:
    steps = read_metrics(folder / run)
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
