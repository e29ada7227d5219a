"""Each recipe of configs/ runs three steps on a tiny model, as two data-parallel ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl.config.load import CONFIG_FOLDER
from tests.launch import torchrun
from tests.trainers.tiny_run import make_tiny_run, read_metrics

RECIPES = sorted(path.stem for path in CONFIG_FOLDER.glob("recipe_*.yaml"))

TINY = {
    "model.backend": "torch",
    "model.dtype": "float32",
    "model.recompute_granularity": "none",
    "parallel.tensor_model_parallel_size": 1,
    "parallel.sequence_parallel": "null",
    "data.train_batch_size": 4,
    "data.max_prompt_length": 40,
    "data.max_response_length": 12,
    "actor.ppo_mini_batch_size": 2,
    "actor.max_tokens_per_micro_batch": 128,
    "rollout.engine": "transformers",
    "rollout.tensor_model_parallel_size": 1,
    "reward.num_workers": 1,
    "trainer.total_training_steps": 3,
    "trainer.val_before_train": "false",
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.logger": "[jsonl]",
    "checkpoint.export_hf": "false",
    "observe.peak_tflops": 0.1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    make_tiny_run(folder)
    paths = {
        "model.path": folder / "model",
        "data.train_files": folder / "train.parquet",
        "data.val_files": "[]",
        "reward.custom.path": folder / "reward.py",
        "reward.overlong_buffer.len": 4,
    }
    runs = {}
    for name in RECIPES:
        settings = {**TINY, **paths}
        text = (CONFIG_FOLDER / f"{name}.yaml").read_text()
        if "n: 64" in text or "n: 16" in text:
            settings["rollout.n"] = 4
        runs[name] = [f"{name}.yaml", *(f"{key}={value}" for key, value in settings.items())]
    torchrun(2, "tests/trainers/train_in_layouts.py", "several", folder, json.dumps(runs), timeout=280)
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_three_steps_that_change_the_policy(folder: Path, name: str) -> None:
    lines = read_metrics(folder / name)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert math.isfinite(line["actor/pg_loss"])
        assert line["actor/grad_norm"] > 0
        assert line["actor/skipped_updates"] == 0


def test_recipes_do_what_their_names_say(folder: Path) -> None:
    first = {name: read_metrics(folder / name)[0] for name in RECIPES}
    assert first["recipe_dapo"]["group/gen_batches"] >= 1
    assert first["recipe_dapo"]["reward/overlong/mean"] < 0
    assert "actor/kl_loss" in first["recipe_grpo"]
    assert "reward/baseline/mean" in first["recipe_remax"]
    for name in ("recipe_rloo", "recipe_reinforce_plus_plus", "recipe_remax"):
        assert first[name]["critic/kl_coeff"] > 0
    assert {name for name, line in first.items() if "critic/kl" in line} == {
        "recipe_rloo",
        "recipe_reinforce_plus_plus",
        "recipe_remax",
    }
