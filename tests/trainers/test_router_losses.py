"""Losses of routers in training without RL: they fall, and metrics say so."""

from __future__ import annotations

from pathlib import Path

from tests.spawn import run_ranks
from tests.trainers.outcomes import DONE, outcomes
from tests.trainers.tiny_pairs import make_tiny_pairs
from tests.trainers.tiny_run import read_metrics


def test_a_reward_model_learns_to_use_its_experts_evenly(tmp_path: Path) -> None:
    config = make_tiny_pairs(tmp_path, family="qwen3_moe")
    runs = {
        "with": ["model.moe_aux_loss_coeff=10", "model.moe_z_loss_coeff=10", "trainer.total_training_steps=6"],
        "without": ["trainer.total_training_steps=1"],
    }
    (found,) = run_ranks(outcomes, 1, config, tmp_path, runs, timeout=200)
    assert found == dict.fromkeys(runs, DONE)
    steps = read_metrics(tmp_path / "with")
    for name in ("router/aux_loss", "router/z_loss"):
        losses = [step[name] for step in steps if name in step]
        assert len(losses) == 6 and losses[-1] < losses[0], losses
    (plain,) = [step for step in read_metrics(tmp_path / "without") if "router/entropy" in step]
    assert "router/aux_loss" not in plain and "router/z_loss" not in plain
    assert plain["router/entropy"] > 0 and plain["router/load_max_over_mean/max"] >= 1
