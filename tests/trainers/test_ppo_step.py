"""Steps of PPO are those of a plain implementation on transformers models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import LIMIT_S, ROOT, torchrun
from tests.tiny_models import make_scalar_model
from tests.trainers.plain_ppo import PlainPPO, Row, Settings
from tests.trainers.rollouts import dumped
from tests.trainers.tiny_run import make_tiny_run, read_metrics

STEPS = 2  # in the first, actor and reference are the same, and nothing is penalised
SETTINGS = Settings(
    temperature=0.8,
    gamma=0.99,
    lam=0.95,
    kl_coef=0.05,
    target_kl=0.1,
    horizon=20,
    epochs=2,
    mini_batch_prompts=2,
    clip_low=0.1,
    clip_high=0.05,
    clip_dual=1.05,
    clip_value=0.02,
    clip_grad=0.5,
    lr=1e-3,
    eps=1e-4,
    weight_decay=1.0,
)
ONE_UPDATE = ["actor.ppo_mini_batch_size=4", "actor.ppo_epochs=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`two steps` of PPO; `on policy`, with one update a step; `warm-up`, a step of the critic alone."""
    folder, s = tmp_path_factory.mktemp("ppo"), SETTINGS
    optim = {"lr": s.lr, "eps": s.eps, "weight_decay": s.weight_decay, "clip_grad": s.clip_grad}
    config = make_tiny_run(
        folder,
        actor={
            "ppo_mini_batch_size": s.mini_batch_prompts,
            "ppo_epochs": s.epochs,
            "max_tokens_per_micro_batch": 128,
            "clip_ratio_low": s.clip_low,
            "clip_ratio_high": s.clip_high,
            "clip_ratio_c": s.clip_dual,
            "loss_agg_mode": "token-mean",
        },
        critic={
            "path": str(folder / "critic"),
            "ppo_epochs": s.epochs,
            "cliprange_value": s.clip_value,
            "optim": optim,
        },
        optim=optim,
        rollout={"n": 4, "temperature": s.temperature},
        algorithm={
            "adv_estimator": "gae",
            "gamma": s.gamma,
            "lam": s.lam,
            "use_kl_in_reward": True,
            "kl_penalty": "k1",
            "kl_ctrl": {
                "type": "adaptive",
                "kl_coef": s.kl_coef,
                "target_kl": s.target_kl,
                "horizon": s.horizon,
            },
        },
    )
    make_scalar_model(folder / "model", folder / "critic")
    runs = {
        "two steps": [f"trainer.total_training_steps={STEPS}", f"trainer.rollout_data_dir={folder / 'rollouts'}"],
        "on policy": ONE_UPDATE,
        "warm-up": [
            *ONE_UPDATE,
            "trainer.critic_warmup=1",
            "trainer.total_training_steps=2",
            "trainer.save_freq=1",
        ],
    }
    torchrun(1, "tests/trainers/train_in_layouts.py", config, folder, json.dumps(runs))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[PlainPPO, list[dict[str, float]]]:
    """The plain implementation after the same steps, and its metrics."""
    ppo = PlainPPO(folder / "model", folder / "critic", SETTINGS)
    return ppo, [ppo.step(rows(dumped(folder / "rollouts", step))) for step in range(1, STEPS + 1)]


def rows(samples: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(
            group=sample["group"],
            prompt=sample["prompt"]["token_ids"],
            response=sample["response_ids"],
            score=sample["rewards"]["score"],
        )
        for sample in samples
    ]


@pytest.mark.parametrize("step", range(STEPS))
def test_the_metrics_of_a_step_are_those_of_the_plain_implementation(
    folder: Path, plain: tuple[PlainPPO, list[dict[str, float]]], step: int
) -> None:
    found, expected = read_metrics(folder / "two steps")[step], plain[1][step]
    for name, value in expected.items():
        # A token on the edge of a clip may fall to either side; it moves nothing but the counts.
        edge = 0.005 if "clipfrac" in name else 2e-6
        assert found[name] == pytest.approx(value, rel=2e-4, abs=edge), name


def test_every_part_of_the_losses_is_at_work(plain: tuple[PlainPPO, list[dict[str, float]]]) -> None:
    """Else agreement would say nothing of it."""
    for metrics in plain[1]:
        assert metrics["actor/pg_clipfrac"] > 0.01
        assert metrics["actor/pg_clipfrac_lower"] > 0.01
        assert metrics["actor/grad_norm"] > SETTINGS.clip_grad
        assert metrics["critic/vf_clipfrac"] > 0.01
        assert metrics["critic/grad_norm"] > SETTINGS.clip_grad
    assert abs(plain[1][1]["critic/kl"]) > 1e-3


@pytest.mark.parametrize(("model", "source", "exported"), [("actor", "model", "hf"), ("critic", "critic", "critic-hf")])
def test_the_updated_weights_are_those_of_the_plain_implementation(
    folder: Path, plain: tuple[PlainPPO, list[dict[str, float]]], model: str, source: str, exported: str
) -> None:
    before = load_file(folder / source / "model.safetensors")
    found = load_file(folder / "two steps" / exported / "model.safetensors")
    expected = getattr(plain[0], model).state_dict()
    assert found.keys() == before.keys() <= expected.keys()
    for name, tensor in found.items():
        moved = (expected[name] - before[name]).norm()
        assert (tensor - expected[name]).norm() < 5e-4 * moved, name


def test_with_one_update_a_step_the_policy_that_is_trained_is_the_one_before_the_update(folder: Path) -> None:
    """The KL penalty needs log-probs before the update, which are computed for themselves and yet the same bits."""
    (found,) = read_metrics(folder / "on policy")
    assert found["actor/ppo_kl"] == 0
    assert found["actor/pg_clipfrac"] == 0
    assert found["actor/grad_norm"] > 0


def test_while_the_critic_warms_up_the_actor_stays_as_it_is(folder: Path, tmp_path: Path) -> None:
    """As the checkpoint after the first step has them, at which the actor's optimizer has not made a step yet."""
    checkpoint = folder / "warm-up" / "checkpoints" / "step-000001"
    after = converted(checkpoint, tmp_path / "actor")
    before = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    moved = converted(checkpoint / "critic", tmp_path / "critic")
    critic = load_file(folder / "critic" / "model.safetensors")
    assert all(not torch.equal(moved[name], tensor) for name, tensor in critic.items())
    trained = load_file(folder / "on policy" / "critic-hf" / "model.safetensors")
    assert all(torch.equal(moved[name], tensor) for name, tensor in trained.items())


def converted(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    command = [sys.executable, "tools/convert/megatron_to_hf.py", "--checkpoint", checkpoint, "--out", folder]
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_S)
    return load_file(folder / "model.safetensors")
