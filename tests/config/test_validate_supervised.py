"""What SFT and reward models need of a config, and what only they can do."""

import json

import pytest

from megarl.config import load_config, validate
from tests.config.test_validate import LLAMA


@pytest.fixture
def run(tmp_path):
    """Problems of a good config with overrides, for a number of ranks; `{}` stands for the test's folder."""
    for name, sizes in {"model": LLAMA, "teacher": {**LLAMA, "num_hidden_layers": 6}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    data = tmp_path / "data.parquet"
    data.touch()
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{train_files: {data}, val_files: {data}, train_batch_size: 24}}\n"
        "trainer: {test_freq: 10}\n",
        encoding="utf-8",
    )

    def problems(*overrides: str, world_size: int = 1) -> list[str]:
        config = load_config(yaml, [override.replace("{}", str(tmp_path)) for override in overrides])
        return validate(config, world_size)

    return problems


SFT, REWARD = "trainer.kind=sft", "trainer.kind=reward_model"
TEACHER = "reward_model.teacher={}/teacher"
GOOD = {
    "sft": [SFT],
    "sft that stops early": [SFT, "trainer.early_stopping_patience=3", "trainer.early_stopping_min_delta=0.01"],
    "wsd": [SFT, "optim.lr_decay_style=wsd", "optim.lr_wsd_decay_steps=5", "optim.min_lr=1e-7"],
    "reward model": [REWARD],
    "distillation without preferences": [REWARD, TEACHER, "reward_model.pairwise_weight=0"],
    "rules of generation do not bind reward models": [REWARD, "rollout.n=1", "actor.ppo_mini_batch_size=7"],
}
ONE_MISTAKE = {
    "early stopping of RL": (
        ["trainer.early_stopping_patience=3", "actor.ppo_mini_batch_size=24"], 1, ["rl has no validation loss"],
    ),
    "early stopping without data": (
        [SFT, "trainer.early_stopping_patience=3", "data.val_files=[]", "trainer.val_before_train=false",
         "trainer.test_freq=-1"],
        1,
        ["nothing is evaluated", "data.val_files", "trainer.test_freq"],
    ),
    "early stopping without evaluations": (
        [SFT, "trainer.early_stopping_patience=3", "trainer.test_freq=-1"], 1, ["nothing is evaluated"],
    ),
    "a delta without patience": (
        [SFT, "trainer.early_stopping_min_delta=0.1"], 1, ["trainer.early_stopping_patience null"],
    ),
    "wsd steps of another style": ([SFT, "optim.lr_wsd_decay_steps=5"], 1, ["lr_decay_style is constant", "wsd"]),
    "nothing to learn": ([REWARD, "reward_model.pairwise_weight=0"], 1, ["nothing would be learned"]),
    "nothing to learn from a teacher": (
        [REWARD, TEACHER, "reward_model.pairwise_weight=0", "reward_model.regression_weight=0"],
        1,
        ["nothing would be learned"],
    ),
    "a teacher that is not there": ([REWARD, "reward_model.teacher=nowhere"], 1, ["reward_model.teacher: nowhere"]),
    "a teacher that does not fit": (
        [REWARD, TEACHER, "parallel.pipeline_model_parallel_size=4"],
        4,
        ["reward_model.teacher: ", "6 layers"],
    ),
    "a pair above the token budget": (
        [REWARD, "actor.max_tokens_per_micro_batch=1500"], 1, ["the two of a pair stay together", "at least 2048"],
    ),
    "pairs do not divide": ([REWARD], 7, ["24 pairs", "21 and 28"]),
}  # fmt: skip


@pytest.mark.parametrize("overrides", GOOD.values(), ids=GOOD.keys())
def test_what_is_right_has_no_problems(run, overrides):
    assert run(*overrides, world_size=2) == []


@pytest.mark.parametrize(("overrides", "world_size", "words"), ONE_MISTAKE.values(), ids=ONE_MISTAKE.keys())
def test_one_mistake_is_one_problem(run, overrides, world_size, words):
    (problem,) = run(*overrides, world_size=world_size)
    for word in words:
        assert word in problem
