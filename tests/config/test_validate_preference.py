"""What preference optimisation needs of a config."""

import json

import pytest

from megarl.config import load_config, validate
from tests.config.test_validate import LLAMA


@pytest.fixture
def run(tmp_path):
    """Problems of a good config with overrides, for a number of ranks; `{}` stands for the test's folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    data = tmp_path / "data.parquet"
    data.touch()
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"model: {{path: {tmp_path / 'model'}}}\n"
        f"data: {{train_files: {data}, val_files: {data}, train_batch_size: 24}}\n"
        "trainer: {kind: preference, test_freq: 10}\n",
        encoding="utf-8",
    )

    def problems(*overrides: str, world_size: int = 1) -> list[str]:
        config = load_config(yaml, [override.replace("{}", str(tmp_path)) for override in overrides])
        return validate(config, world_size)

    return problems


ROUNDS, SPIN = "preference.rounds=2", "preference.loss_type=spin"
GOOD = {
    "dpo": ["preference.label_smoothing=0.1"],
    "ipo": ["preference.loss_type=ipo"],
    "kto": ["preference.loss_type=kto", "preference.desirable_weight=1.3"],
    "sppo on pairs that there are": ["preference.loss_type=sppo", "preference.beta=0.001"],
    "sppo in rounds": ["preference.loss_type=sppo", ROUNDS, "preference.prompts_per_round=100"],
    "dpo in rounds": [ROUNDS],
    "spin": [SPIN, ROUNDS],
    "spin scores nothing": [SPIN, ROUNDS, "rollout.n=1", "reward.rule_weight=null"],
    "rules of generation do not bind pairs": ["rollout.n=1", "actor.ppo_mini_batch_size=7", "rollout.engine=dataset"],
    "a loss of one's own": ["preference.loss_type=hinge", "preference.label_smoothing=0.1", "algorithm.plugins=[{}]"],
    "early stopping": ["trainer.early_stopping_patience=3"],
    "a response of kto has a pack for itself": ["preference.loss_type=kto", "actor.max_tokens_per_micro_batch=1024"],
}
ONE_MISTAKE = {
    "an unknown loss": (["preference.loss_type=sigmoid"], ["preference.loss_type is 'sigmoid'", "dpo, ipo, kto"]),
    "beta": (["preference.beta=0"], ["preference.beta is 0", "above 0"]),
    "spin without rounds": ([SPIN], ["spin learns from the policy's own responses", "preference.rounds"]),
    "smoothing of another loss": (
        ["preference.loss_type=ipo", "preference.label_smoothing=0.1"],
        ["preference.label_smoothing is 0.1, but only dpo has it", "ipo"],
    ),
    "weights of another loss": (
        ["preference.desirable_weight=2"], ["preference.desirable_weight is 2", "only kto has it"],
    ),
    "labels that are chance": (["preference.label_smoothing=0.5"], ["preference.label_smoothing is 0.5", "at most"]),
    "nothing to learn": (
        ["preference.loss_type=kto", "preference.desirable_weight=0", "preference.undesirable_weight=0"],
        ["nothing would be learned"],
    ),
    "prompts of no round": (["preference.prompts_per_round=5"], ["preference.rounds 0", "both or neither"]),
    "one sample makes no pair": ([ROUNDS, "rollout.n=1"], ["rollout.n is 1", "2 or more"]),
    "nothing scores": (
        [ROUNDS, "reward.rule_weight=null"], ["nothing scores", "reward.rule_weight", "reward.model.path"],
    ),
    "rounds without export": ([ROUNDS, "checkpoint.export_hf=false"], ["checkpoint.export_hf is false"]),
    "rounds that generate nothing": ([ROUNDS, "rollout.engine=dataset"], ["rollout.engine is dataset"]),
    "rounds from a checkpoint": (
        [ROUNDS, "trainer.resume_mode=path", "trainer.resume_from_path={}"], ["resume_mode path", "use auto"],
    ),
    "a reward model that is not there": ([ROUNDS, "reward.model.path=nowhere"], ["reward.model.path: nowhere"]),
    "a pair above the token budget": (
        ["actor.max_tokens_per_micro_batch=1500"], ["the two of a pair stay together", "at least 2048"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("overrides", GOOD.values(), ids=GOOD.keys())
def test_what_is_right_has_no_problems(run, overrides):
    assert run(*overrides, world_size=2) == []


@pytest.mark.parametrize(("overrides", "words"), ONE_MISTAKE.values(), ids=ONE_MISTAKE.keys())
def test_one_mistake_is_one_problem(run, overrides, words):
    (problem,) = run(*overrides)
    for word in words:
        assert word in problem


def test_responses_of_kto_are_shared_out_one_by_one(run):
    (problem,) = run("preference.loss_type=kto", world_size=5)
    assert "24 responses" in problem
    (problem,) = run(world_size=5)
    assert "24 pairs" in problem


def test_the_example_lacks_only_the_files_that_it_is_run_on():
    config = load_config("tiny_dpo.yaml", [])
    problems = validate(config, 2)
    assert problems and all("does not exist" in problem or "is not a folder" in problem for problem in problems)
