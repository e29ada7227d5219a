"""A GRPO step on the same rollouts gives the same model in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launch import torchrun
from tests.trainers.tiny_run import make_tiny_run, read_metrics

TOLERANCE = 1e-5

TP, PP, VPP, CP = (
    f"parallel.{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
)
LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {"again": [], "small micro-batches": ["actor.max_tokens_per_micro_batch=56"]},
    2: {"TP2": [TP], "PP2": [PP], "CP2": [CP], "DP2": [], "PP2 VPP2": [PP, VPP]},
    4: {"TP2 PP2": [TP, PP], "TP2 DP2": [TP]},
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run generates; the others train on its rollouts."""
    folder = tmp_path_factory.mktemp("rl")
    # Two mini-batches, two epochs, a reference model and an entropy bonus: every pass there is.
    config = make_tiny_run(
        folder,
        actor={
            "ppo_mini_batch_size": 2,
            "ppo_epochs": 2,
            "max_tokens_per_micro_batch": 128,
            "use_kl_loss": True,
            "kl_loss_coef": 0.05,
            "entropy_coeff": 0.01,
        },
    )
    program = "tests/trainers/train_in_layouts.py"
    first = {"one": [f"trainer.rollout_data_dir={folder / 'rollouts'}"]}
    torchrun(1, program, config, folder, json.dumps(first))
    for ranks, layouts in LAYOUTS.items():
        replayed = {name: [*keys, f"rollout.replay_dir={folder / 'rollouts'}"] for name, keys in layouts.items()}
        torchrun(ranks, program, config, folder, json.dumps(replayed), timeout=280)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", NAMES)
def test_replayed_step_gives_the_same_weights(folder: Path, layout: str) -> None:
    expected = load_file(folder / "one" / "hf" / "model.safetensors")
    found = load_file(folder / layout / "hf" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < TOLERANCE * tensor.norm(), name


@pytest.mark.parametrize("layout", NAMES)
def test_replayed_step_gives_the_same_metrics(folder: Path, layout: str) -> None:
    (expected,), (found,) = read_metrics(folder / "one"), read_metrics(folder / layout)
    about_time_or_layout = ("timing_s/", "perf/", "batch/", "sync/", "reward/")
    names = {name for name in expected if not name.startswith(about_time_or_layout)}
    assert names == {name for name in found if not name.startswith(about_time_or_layout)}
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_the_step_moved_the_weights_far_more_than_the_tolerance(folder: Path) -> None:
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "one" / "hf" / "model.safetensors")
    moved = [((after[name] - tensor).norm() / tensor.norm()).item() for name, tensor in before.items()]
    assert min(moved) > 20 * TOLERANCE
