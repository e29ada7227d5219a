"""Router replay in RL: what is replayed is what was recorded or reported, and the same in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megarl.config import load_config
from megarl.trainers.rl_parts import StepNeeds
from tests.launch import torchrun
from tests.spawn import run_ranks
from tests.trainers.outcomes import is_one_sentence, outcomes
from tests.trainers.rollouts import dumped
from tests.trainers.tiny_run import make_tiny_run, read_metrics

TOLERANCE = 1e-5
R2, R3 = "actor.router_replay.mode=R2", "actor.router_replay.mode=R3"
EP, ETP = "parallel.expert_model_parallel_size=2", "parallel.expert_tensor_parallel_size=1"
TP, CP = "parallel.tensor_model_parallel_size=2", "parallel.context_parallel_size=2"
PP = ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"]
LAYOUTS = {"EP2": [EP], "TP2 EP2": [TP, EP, ETP], "PP2 VPP2": PP, "CP2 recompute full": [CP]}
ROUTER_METRICS = (
    "router/agreement",
    "router/entropy",
    "router/load_max_over_mean/max",
    "router/aux_loss",
    "router/z_loss",
    "router/expert_bias/max",
)
ONE_UPDATE = ["actor.ppo_mini_batch_size=4", "actor.ppo_epochs=1", "trainer.total_training_steps=1"]
STANDSTILL = ["optim.lr=1e-12", "trainer.total_training_steps=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process generates with R3; all other runs train on its rollouts."""
    folder = tmp_path_factory.mktemp("runs")
    config = make_tiny_run(
        folder,
        family="deepseek_v3",
        model={"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
        actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2, "max_tokens_per_micro_batch": 128},
        trainer={"total_training_steps": 2, "val_before_train": False, "logger": ["jsonl"]},
    )
    replay = f"rollout.replay_dir={folder / 'rollouts'}"
    one = {
        "R3": [R3, f"trainer.rollout_data_dir={folder / 'rollouts'}"],
        "R2": [R2, replay],
        "disabled": [replay],
        "R3, one update": [R3, replay, *ONE_UPDATE],
        "R2, one update": [R2, replay, *ONE_UPDATE],
        "disabled, one update": [replay, *ONE_UPDATE],
        "R2, standstill": [R2, replay, *STANDSTILL],
    }
    _run(1, config, folder, one)
    for part in (("EP2", "TP2 EP2"), ("PP2 VPP2", "CP2 recompute full")):
        runs = {f"{mode[-2:]} {name}": [mode, replay, *_settings(name)] for name in part for mode in (R2, R3)}
        _run(2, config, folder, runs)
    return folder


def _settings(layout: str) -> list[str]:
    recompute = ["model.recompute_granularity=full"] if layout.endswith("recompute full") else []
    return [*LAYOUTS[layout], *recompute]


def _run(ranks: int, config: Path, folder: Path, runs: dict[str, list[str]]) -> None:
    torchrun(ranks, "tests/trainers/train_in_layouts.py", config, folder, json.dumps(runs), timeout=280)


def weights(folder: Path, run: str) -> dict[str, Any]:
    return load_file(folder / run / "hf" / "model.safetensors")


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative L2 distance of a tensor."""
    assert found.keys() == expected.keys()
    return max(((found[name] - t).norm() / t.norm()).item() for name, t in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_replayed_steps_give_the_same_weights_in_every_layout(folder: Path, mode: str, layout: str) -> None:
    assert distance(weights(folder, f"{mode} {layout}"), weights(folder, mode)) < TOLERANCE
    found, expected = read_metrics(folder / f"{mode} {layout}"), read_metrics(folder / mode)
    for name in (*ROUTER_METRICS, "actor/grad_norm"):
        assert [step[name] for step in found] == pytest.approx([step[name] for step in expected], rel=1e-4)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_later_updates_do_not_choose_what_is_replayed_and_so_end_elsewhere(folder: Path, mode: str) -> None:
    assert all(0 < step["router/agreement"] < 1 for step in read_metrics(folder / mode))
    assert distance(weights(folder, mode), weights(folder, "disabled")) > 20 * TOLERANCE


def test_weights_that_stand_still_choose_what_they_chose_for_old_logprobs(folder: Path) -> None:
    (step,) = read_metrics(folder / "R2, standstill")
    assert step["router/agreement"] == 1.0
    assert step["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)


def test_the_first_update_chooses_what_the_engine_chose_with_the_same_weights(folder: Path) -> None:
    (step,) = read_metrics(folder / "R3, one update")
    assert step["router/agreement"] > 0.999
    assert distance(weights(folder, "R3, one update"), weights(folder, "disabled, one update")) < TOLERANCE


def test_with_one_update_r2_has_nothing_to_replay(folder: Path) -> None:
    (step,) = read_metrics(folder / "R2, one update")
    assert "router/agreement" not in step
    assert distance(weights(folder, "R2, one update"), weights(folder, "disabled, one update")) == 0


def test_the_trainer_agrees_with_the_engine_about_log_probs(folder: Path) -> None:
    """Old log-probs are computed with the engine's experts, at the engine's weights."""
    for step in read_metrics(folder / "R3"):
        assert step["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.parametrize(
    "setting", ["model.moe_aux_loss_coeff=0.1", "model.moe_z_loss_coeff=0.1", "model.moe_router_bias_update_rate=0.1"]
)
def test_samples_without_advantage_take_part_where_they_move_routers(tmp_path: Path, setting: str) -> None:
    config = make_tiny_run(tmp_path, family="glm4_moe")
    assert StepNeeds.of(load_config(config, [])).skips_zero_advantage
    assert not StepNeeds.of(load_config(config, [setting])).skips_zero_advantage


def test_rollouts_that_were_dumped_without_experts_are_refused(folder: Path) -> None:
    source, stripped = folder / "rollouts" / "step-000001", folder / "stripped" / "step-000001"
    stripped.mkdir(parents=True)
    lines = [{**sample, "routed_experts": None} for sample in dumped(source.parent)]
    (stripped / "rank-00000.jsonl").write_text("\n".join(map(json.dumps, lines)))
    runs = {"stripped": [R3, f"rollout.replay_dir={stripped.parent}"]}
    (found,) = run_ranks(outcomes, 1, folder / "run.yaml", folder, runs)
    assert is_one_sentence(found["stripped"])
    assert "R3, but rollout.replay_dir gives sample 0 of prompt 0 without the experts" in found["stripped"]


def test_dumped_samples_have_the_experts_of_every_token_but_the_last(folder: Path) -> None:
    for sample in dumped(folder / "rollouts"):
        tokens = len(sample["prompt"]["token_ids"]) + len(sample["response_ids"])
        assert sample["routed_experts"]["shape"] == [tokens, 3, 2]
