"""A run that was interrupted and resumed is the run that was not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import torchrun
from tests.trainers.tiny_run import make_tiny_run, read_metrics

PROGRAM = "tests/trainers/train_in_layouts.py"
KEYS = ["actor.ppo_mini_batch_size=4", "rollout.check_weight_sync=true", "optim.lr_warmup_steps=3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`: four steps. `first`: two, with a checkpoint. Then the same run goes on, in three layouts."""
    folder = tmp_path_factory.mktemp("resume")
    # PPO with all that has a state: a critic, a KL controller, and a buffer of samples.
    config = make_tiny_run(
        folder,
        trainer={"logger": ["jsonl"], "val_before_train": False},
        critic={"optim": {"lr": 1e-3, "eps": 1e-4, "lr_warmup_steps": 3}},
        algorithm={
            "adv_estimator": "gae",
            "lam": 0.9,
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.05, "horizon": 20},
            "pf_ppo": {"enable": True, "buffer_size": 24},
        },
    )
    total, saving = "trainer.total_training_steps=4", "trainer.save_freq=2"
    runs = {"whole": [*KEYS, total], "first": [*KEYS, total, saving]}
    torchrun(1, PROGRAM, config, folder, json.dumps(runs))
    for name, ranks, layout in (
        ("same", 1, []),
        ("TP2", 2, ["parallel.tensor_model_parallel_size=2"]),
        ("DP2", 2, []),
    ):
        (folder / name / "checkpoints").mkdir(parents=True)
        shutil.copytree(folder / "first" / "checkpoints" / "step-000002", folder / name / "checkpoints" / "step-000002")
        torchrun(ranks, PROGRAM, config, folder, json.dumps({name: [*KEYS, *layout, total]}))
    return folder


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Of actor and critic."""
    critic = load_file(folder / name / "critic-hf" / "model.safetensors")
    return {**load_file(folder / name / "hf" / "model.safetensors"), **{f"critic {n}": t for n, t in critic.items()}}


def test_resuming_in_the_same_layout_is_bit_identical(folder: Path) -> None:
    whole, resumed = weights(folder, "whole"), weights(folder, "same")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    steps = {line["step"]: line for line in read_metrics(folder / "same")}
    assert sorted(steps) == [3, 4]
    for line in read_metrics(folder / "whole")[2:]:
        same = {name: value for name, value in line.items() if not name.startswith(("timing_s/", "perf/"))}
        assert same == {name: steps[line["step"]][name] for name in same}


def test_saving_changes_nothing(folder: Path) -> None:
    whole, saved = weights(folder, "whole"), weights(folder, "first")
    assert all(torch.equal(saved[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("layout", ["TP2", "DP2"])
def test_resuming_in_another_layout_goes_on_with_the_optimizer_state(folder: Path, layout: str) -> None:
    """The next step's rollouts are of the same weights, so its metrics agree as far as float32 does."""
    expected, found = read_metrics(folder / "whole")[2], read_metrics(folder / layout)[0]
    assert found["step"] == 3
    same = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/score/mean", "response_length/mean")
    for name in (*same, "critic/vf_loss", "critic/grad_norm", "critic/lr", "critic/kl_coeff"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    start = load_file(folder / "model" / "model.safetensors")
    for name, tensor in weights(folder, "whole").items():
        # The critic began as the model, with a head of zeros.
        before = start.get(name.removeprefix("critic "), torch.zeros_like(tensor))
        moved, apart = (tensor - before).norm(), (weights(folder, layout)[name] - tensor).norm()
        assert apart < 0.01 * moved, name
