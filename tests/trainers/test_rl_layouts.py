"""Steps on the same rollouts give the same actor and critic in every layout."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.launch import torchrun
from tests.tiny_models import make_scalar_model
from tests.trainers.tiny_run import make_tiny_run, read_metrics

TOLERANCE = 1e-5

TP, PP, VPP, CP = (
    f"parallel.{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
)
LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {"small micro-batches": ["actor.max_tokens_per_micro_batch=56"]},
    2: {"TP2": [TP], "PP2": [PP], "CP2": [CP], "DP2": [], "PP2 VPP2": [PP, VPP]},
    4: {"TP2 PP2": [TP, PP], "TP2 DP2": [TP]},
}
RUNS: dict[str, dict[str, Any]] = {
    # Two mini-batches, two epochs, a reference model and an entropy bonus.
    "grpo": {
        "actor": {
            "ppo_mini_batch_size": 2,
            "ppo_epochs": 2,
            "max_tokens_per_micro_batch": 128,
            "use_kl_loss": True,
            "kl_loss_coef": 0.05,
            "entropy_coeff": 0.01,
        },
    },
    # A critic that packs in its own way, a KL penalty whose weight moves, and corrections for an engine that is off.
    "ppo": {
        "actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "max_tokens_per_micro_batch": 128},
        "critic": {"max_tokens_per_micro_batch": 96, "ppo_epochs": 2, "optim": {"lr": 1e-3, "eps": 1e-4}},
        "algorithm": {
            "adv_estimator": "gae",
            "lam": 0.95,
            "gamma": 0.99,
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "horizon": 20},
            "rollout_correction": {"rollout_is": "token", "rollout_rs": "sequence_k1", "rollout_rs_threshold": 1.01},
        },
    },
    # A loss that looks at whole responses, and an estimator of both groups and tokens.
    "gspo": {
        "actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "policy_loss": "gspo"},
        "algorithm": {"adv_estimator": "reinforce_plus_plus_baseline"},
    },
    # A loss that treats some tokens of the mini-batch apart.
    "kl_cov": {
        "actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "policy_loss": "kl_cov", "kl_cov_ratio": 0.1},
        "algorithm": {"adv_estimator": "reinforce_plus_plus"},
    },
}
LAYOUTS_OF = {
    "grpo": LAYOUTS,
    "ppo": LAYOUTS,
    "gspo": {2: {"CP2": [CP], "DP2": []}},
    "kl_cov": {2: {"CP2": [CP], "DP2": []}},
}
CASES = [(run, name) for run, sizes in LAYOUTS_OF.items() for layouts in sizes.values() for name in layouts]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a run: one process generates in two steps; the others train on its rollouts."""

    @functools.cache
    def make(run: str) -> Path:
        folder = tmp_path_factory.mktemp(run)
        trainer = {"default_local_dir": str(folder / "out"), "total_training_steps": 2, "val_before_train": False}
        config = make_tiny_run(folder, trainer={**trainer, "logger": ["jsonl"]}, **RUNS[run])
        critic = make_scalar_model(folder / "model", folder / "critic")
        program = "tests/trainers/train_in_layouts.py"
        keys = [f"critic.path={critic}"]
        first = {"one": [*keys, f"trainer.rollout_data_dir={folder / 'rollouts'}"]}
        torchrun(1, program, config, folder, json.dumps(first))
        _disturb(folder / "rollouts")
        # The engine's log-probs are other ones now, so the first run is made again from the dump.
        (folder / "one").rename(folder / "generated")
        again = {"one": [], **LAYOUTS_OF[run].get(1, {})}
        for ranks, layouts in {**LAYOUTS_OF[run], 1: again}.items():
            replayed = {
                name: [*keys, *more, f"rollout.replay_dir={folder / 'rollouts'}"] for name, more in layouts.items()
            }
            torchrun(ranks, program, config, folder, json.dumps(replayed), timeout=280)
        return folder

    return make


def _disturb(rollouts: Path) -> None:
    """Moves the engine's log-probs by up to 0.1, as other kernels and precisions would."""
    numbers = random.Random(1)
    for path in rollouts.glob("*/*.jsonl"):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        for sample in samples:
            sample["rollout_logprobs"] = [value + numbers.uniform(-0.1, 0.1) for value in sample["rollout_logprobs"]]
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))


@pytest.mark.parametrize(("run", "layout"), CASES)
def test_replayed_steps_give_the_same_weights(folder_of: Callable[[str], Path], run: str, layout: str) -> None:
    folder = folder_of(run)
    for model in ("hf", "critic-hf") if run == "ppo" else ("hf",):
        expected = load_file(folder / "one" / model / "model.safetensors")
        found = load_file(folder / layout / model / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name] - tensor).norm() < TOLERANCE * tensor.norm(), (model, name)


@pytest.mark.parametrize(("run", "layout"), CASES)
def test_replayed_steps_give_the_same_metrics(folder_of: Callable[[str], Path], run: str, layout: str) -> None:
    folder = folder_of(run)
    about_time_or_layout = ("timing_s/", "perf/", "batch/", "sync/", "reward/")
    for expected, found in zip(read_metrics(folder / "one"), read_metrics(folder / layout), strict=True):
        names = {name for name in expected if not name.startswith(about_time_or_layout)}
        assert names == {name for name in found if not name.startswith(about_time_or_layout)}
        for name in names:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("run", RUNS)
def test_the_steps_moved_the_weights_far_more_than_the_tolerance(folder_of: Callable[[str], Path], run: str) -> None:
    folder = folder_of(run)
    pairs = {"model": "hf", "critic": "critic-hf"} if run == "ppo" else {"model": "hf"}
    for source, result in pairs.items():
        before = load_file(folder / source / "model.safetensors")
        after = load_file(folder / "one" / result / "model.safetensors")
        moved = {n: ((after[n] - t).norm() / t.norm().clamp(min=1e-3)).item() for n, t in before.items()}
        assert min(moved.values()) > 20 * TOLERANCE, min(moved, key=moved.__getitem__)


def test_the_ppo_run_does_all_that_it_is_meant_to(folder_of: Callable[[str], Path]) -> None:
    first, second = read_metrics(folder_of("ppo") / "one")
    assert first["critic/kl"] == pytest.approx(0, abs=1e-6)  # actor and reference are the same at first
    assert second["critic/kl"] != pytest.approx(0, abs=1e-3)
    assert second["critic/kl_coeff"] < 0.05 * 0.9
    assert first["critic/values/min"] < first["critic/values/max"]
    assert 0 < first["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert first["rollout_corr/rollout_is_mean"] != pytest.approx(1, abs=1e-6)
