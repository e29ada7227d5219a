"""`launch/pipeline.sh` goes the whole road: SFT, a reward model, PPO with a critic, exports. A few steps only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file

from tests.launch import LIMIT_S, ROOT
from tests.trainers.tiny_run import read_metrics

STEPS = 7
"""Two more than the critic's warm-up in configs/pipeline_ppo.yaml."""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pipeline") / "output"
    command = [sys.executable, "launch/pipeline.py", "--steps", str(STEPS), "--ranks", "1", "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return output


def test_the_summary_says_what_was_measured(output: Path) -> None:
    summary = json.loads((output / "summary.json").read_text())
    assert 0 <= summary["reward_model_accuracy"] <= 1
    assert [point["step"] for point in summary["curve"]] == [0, STEPS]
    assert summary["after_sft"] == summary["curve"][0]
    assert 0 <= summary["after_ppo"]["accuracy"] <= 1
    assert set(summary["seconds"]) == {"model", "data", "sft", "reward_model", "ppo"}


def test_the_stages_build_on_one_another(output: Path) -> None:
    """PPO's critic begins as the reward model, and its actor as the SFT model, which no step moves during warm-up."""
    first, *_, last = [line for line in read_metrics(output / "ppo") if line["step"] > 0]
    assert first["critic/values/max"] != 0
    assert "actor/pg_loss" not in first
    assert "actor/pg_loss" in last
    sft, ppo = (load_file(output / stage / "hf" / "model.safetensors") for stage in ("sft", "ppo"))
    assert any((ppo[name] - tensor).abs().max() > 0 for name, tensor in sft.items())


def test_the_exports_are_models_to_transformers(output: Path) -> None:
    classes = {
        "sft/hf": transformers.AutoModelForCausalLM,
        "reward_model/hf": transformers.AutoModelForSequenceClassification,
        "ppo/hf": transformers.AutoModelForCausalLM,
        "ppo/critic-hf": transformers.AutoModelForTokenClassification,
    }
    for folder, model_class in classes.items():
        _, report = model_class.from_pretrained(output / folder, output_loading_info=True)
        assert not report["missing_keys"], folder
