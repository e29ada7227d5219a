"""Runs with the real SGLang: engine and trainer have the same log-probs after every update, in layouts of both.

Log-probs in `rollout_corr/logprob_diff_max` are those of the engine, and of the trainer's own forward pass before the
update. From the second step on the engine's weights are those of a sync after an update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch import torchrun
from tests.trainers.tiny_run import make_tiny_run, read_metrics

STEPS = 6
"""Five of them begin with weights of a sync after an update."""
TOLERANCE = 1e-4
SINGLE_UPDATE = {"ppo_mini_batch_size": 4}


def make_run(folder: Path, family: str, engine_size: int, steps: int = STEPS, **sections: dict[str, Any]) -> Path:
    rollout = {"n": 4, "engine": "sglang", "tensor_model_parallel_size": engine_size, "max_num_seqs": 16}
    return make_tiny_run(
        folder,
        family=family,
        prompts=4,
        **{
            **sections,
            "rollout": {**rollout, **sections.get("rollout", {})},
            "actor": {**SINGLE_UPDATE, "max_tokens_per_micro_batch": 128, **sections.get("actor", {})},
            "trainer": {
                "default_local_dir": str(folder / "out"),
                "total_training_steps": steps,
                "total_epochs": steps,
                "val_before_train": False,
                "logger": ["jsonl"],
            },
        },
    )


def assert_engine_and_trainer_agree(folder: Path, steps: int = STEPS) -> None:
    metrics = [line for line in read_metrics(folder / "out") if line["step"] > 0]
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    for line in metrics:
        assert line["rollout_corr/logprob_diff_max"] < TOLERANCE, line["step"]
        assert line["actor/grad_norm"] > 0, "without a gradient there is no update to compare after"


CASES = {
    "dense, trainer TP2×PP2, two engines of TP2": (
        4,
        "qwen3",
        2,
        {"parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}},
    ),
    "MoE, trainer DP2×EP2, engine TP2 with its routing replayed": (
        2,
        "qwen3_moe",
        2,
        {
            "parallel": {"expert_model_parallel_size": 2},
            "actor": {"router_replay": {"mode": "R3"}},
        },
    ),
    "dense, trainer CP2, two engines of TP1": (2, "qwen2_tied", 1, {"parallel": {"context_parallel_size": 2}}),
}


@pytest.mark.parametrize(("ranks", "family", "engine_size", "sections"), CASES.values(), ids=CASES)
def test_engine_and_trainer_agree_after_each_of_five_updates(
    tmp_path: Path, ranks: int, family: str, engine_size: int, sections: dict[str, Any]
) -> None:
    config = make_run(tmp_path, family, engine_size, **sections)
    torchrun(ranks, "launch/train.py", "--config", config, timeout=280)
    assert_engine_and_trainer_agree(tmp_path)


def test_a_run_goes_on_when_its_engine_is_killed_in_a_rollout_and_in_a_sync(tmp_path: Path) -> None:
    config = make_run(tmp_path, "qwen3_moe", 1, steps=3)
    result = torchrun(1, "tests/trainers/sglang_kill_rank.py", config, timeout=280)
    assert_engine_and_trainer_agree(tmp_path, steps=3)
    assert result.stderr.count("warning: the engine of rank 0 died") == 2


def test_an_argument_that_sglang_cannot_use_is_answered_in_a_sentence(tmp_path: Path) -> None:
    config = make_run(tmp_path, "qwen3", 1, rollout={"sglang": {"schedule_policy": "no-such-policy"}})
    result = torchrun(1, "launch/train.py", "--config", config, timeout=200, check=False)
    assert result.returncode != 0
    assert "rank 0: SGLang did not start: ValueError: Unknown schedule_policy: policy='no-such-policy'" in result.stderr
