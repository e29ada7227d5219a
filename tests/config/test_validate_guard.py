"""Guards that could not do what they say are refused before a run begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import ConfigError, load_config, validate
from megarl.config.guard_notes import guard_notes
from megarl.config.guard_rules import guard_rules
from megarl.config.metric_names import known_metrics
from tests.config.test_validate import LLAMA

Problems = Callable[..., list[str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    data = tmp_path / "data.parquet"
    data.touch()
    yaml = tmp_path / "run.yaml"
    yaml.write_text(
        f"model: {{path: {tmp_path}}}\n"
        f"data: {{train_files: {data}, val_files: {data}, train_batch_size: 8}}\n"
        "actor: {ppo_mini_batch_size: 8}\n"
        "trainer: {save_freq: 5}\n",
        encoding="utf-8",
    )
    return yaml


@pytest.fixture
def problems(config: Path) -> Problems:
    return lambda *overrides: validate(load_config(config, overrides), 1)


def test_the_defaults_only_warn_but_for_gradients_that_stay_nan(config: Path) -> None:
    actions = {rule.name: rule.action for rule in guard_rules(load_config(config))}
    assert actions.pop("nan") == "stop"
    assert set(actions.values()) == {"warn"} and len(actions) == 8


GOOD = {
    "every action": [
        "guard.kl.action=skip_step",
        "guard.reward.action=rollback",
        "guard.entropy.action=lower_lr",
        "guard.grad_norm.action=stop",
        "guard.cut_off.action=none",
    ],
    "a rule over a metric that only the run knows": ["guard.rules=[{metric: reward/letters/mean, below: 0.5}]"],
    "a rule over an evaluation": [
        "guard.rules=[{metric: val-core/gsm8k/reward/mean@1, drop_below_average: 0.1}]",
        "trainer.test_freq=5",
    ],
    "what is switched off": [
        "guard.entropy={below: 0, action: none}",
        "guard.rules=[{metric: actor/entropy, below: 0, action: none}, {metric: val/a, above: 1, action: none}]",
    ],
    "bounds that are only just possible": [
        "guard.cut_off.above=0.99",
        "guard.entropy.below=0.001",
        "guard.rules=[{metric: actor/pg_clipfrac, drop_below_average: 0.99}, {metric: actor/ppo_kl, below: -1}]",
    ],
    "one rule without brackets": ["guard.rules={metric: actor/entropy, below: 0.1, window: 3, action: stop}"],
    "the critic's loss where there is one": ["guard.value_loss.action=stop", "algorithm.adv_estimator=gae"],
    "a supervised run": ["trainer.kind=sft", "guard.rules=[{metric: train/loss, times_average: 3, window: 9}]"],
}


@pytest.mark.parametrize("overrides", GOOD.values(), ids=GOOD.keys())
def test_these_guards_are_taken(overrides: list[str], problems: Problems) -> None:
    assert problems(*overrides) == []


ONE_MISTAKE = {
    "a misspelt metric": (
        ["guard.rules=[{metric: actor/entropie, below: 0.1}]"],
        ["guard.rules[0].metric is 'actor/entropie'", "similar ones are actor/entropy"],
    ),
    "a metric of another kind of run": (
        ["trainer.kind=sft", "guard.rules=[{metric: actor/entropy, below: 0.1}]"],
        ["actor/entropy", "does not have"],
    ),
    "no metric": (["guard.rules=[{above: 1}]"], ["guard.rules[0] has no metric"]),
    "no condition": (["guard.rules=[{metric: actor/entropy}]"], ["says nothing about when it fires", "times_average"]),
    "two conditions": (
        ["guard.rules=[{metric: actor/entropy, above: 1, below: 0}]"],
        ["has above and below", "exactly one"],
    ),
    "a window of nothing": (
        ["guard.rules=[{metric: actor/entropy, below: 0.1}, {metric: actor/entropy, above: 3, window: 0}]"],
        ["guard.rules[1].window is 0", "at least 1"],
    ),
    "an action that is none": (
        ["guard.rules=[{metric: actor/entropy, below: 0.1, action: panic}]"],
        ["guard.rules[0].action is 'panic'", "rollback"],
    ),
    "an action of a name that is none": (["guard.kl.action=panic"], ["guard.kl.action is 'panic'"]),
    "a rollback to nothing": (
        ["guard.reward.action=rollback", "trainer.save_freq=-1"],
        ["guard.reward.action is rollback", "trainer.save_freq is -1"],
    ),
    "a rollback to the same rows": (
        ["guard.reward.action=rollback", "data.shuffle=false"],
        ["data.shuffle false", "the same order"],
    ),
    "a skipped step with patience": (
        ["guard.kl.action=skip_step", "guard.kl.patience=2"],
        ["guard.kl.patience is 2", "leave patience out"],
    ),
    "what happens to NaN in any case": (["guard.nan.action=skip_step", "guard.nan.patience=1"], ["guard.nan.action"]),
    "a guard with nothing to watch": (
        ["guard.value_loss.action=stop"],
        ["guard.value_loss is set", "rl with grpo", "critic/vf_loss"],
    ),
    "a share above one": (
        ["guard.cut_off.above=1"],
        ["guard.cut_off.above is 1", "response_length/clip_ratio is at most"],
    ),
    "an entropy below zero": (["guard.entropy.below=0"], ["guard.entropy.below is 0", "actor/entropy is at least 0"]),
    "a share that falls by all of it": (
        ["guard.rules=[{metric: actor/pg_clipfrac, drop_below_average: 1}]"],
        ["guard.rules[0].drop_below_average is 1", "lies between 0 and 1"],
    ),
    "a norm below zero": (
        ["guard.rules=[{metric: actor/grad_norm, below: -0.5}]"],
        ["guard.rules[0].below is -0.5", "would never act"],
    ),
    "a metric of evaluations that are never made": (
        ["guard.rules=[{metric: val-core/gsm8k/reward/mean@1, below: 0.1}]"],
        ["guard.rules[0].metric", "trainer.test_freq is -1"],
    ),
    "what guards did": (["guard.rules=[{metric: guard/fired, above: 2}]"], ["'guard/fired'", "says what guards did"]),
    "a rate that is not lowered": (
        ["guard.entropy.action=lower_lr", "guard.lr_factor=1"],
        ["guard.entropy.action is lower_lr", "guard.lr_factor 1"],
    ),
    "a rate that cannot go down": (
        ["guard.entropy.action=lower_lr", "guard.min_lr_factor=1"],
        ["guard.entropy.action is lower_lr", "guard.min_lr_factor 1"],
    ),
    "a factor above one": (["guard.lr_factor=1.5"], ["guard.lr_factor is 1.5", "at most 1"]),
}


@pytest.mark.parametrize(("overrides", "words"), ONE_MISTAKE.values(), ids=ONE_MISTAKE.keys())
def test_one_mistake_is_one_problem(overrides: list[str], words: list[str], problems: Problems) -> None:
    (problem,) = problems(*overrides)
    for word in words:
        assert word in problem
    assert problem.endswith(".") and "\n" not in problem


UNREADABLE = {
    "an unknown key": ("guard.rules=[{metrik: a, above: 1}]", ["'guard.rules[0].metrik'", "'guard.rules[0].metric'"]),
    "a text for a number": ("guard.rules=[{metric: a, above: much}]", ["'guard.rules' must be a list of {"]),
    "no rule at all": ("guard.rules=[actor/entropy]", ["'guard.rules' must be a list of {"]),
}


@pytest.mark.parametrize(("override", "words"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_rule_that_cannot_be_read_is_one_problem(override: str, words: list[str], config: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(config, [override])
    (problem,) = error.value.problems
    for word in words:
        assert word in problem


def test_a_critic_of_a_persons_own_estimator_may_be_watched(config: Path) -> None:
    known = known_metrics(load_config(config, ["algorithm.adv_estimator=mine", "algorithm.plugins=[mine.py]"]))
    assert not known.rules_out("critic/vf_loss")


NOTES = {
    # Of each: settings, steps of the run, and what the note says; None: there is none.
    "the defaults in a short run": ([], 2, None),
    "an average of steps before": (
        ["guard.reward={window: 20, patience: 3, action: stop}"],
        22,
        "guard.reward cannot act in this run: it needs 23 values of critic/score/mean (window 20, patience 3)",
    ),
    "as many as it needs": (["guard.reward={window: 20, patience: 3, action: stop}"], 23, None),
    "an average up to the step": (
        ["guard.rules=[{metric: actor/entropy, below: 0.1, window: 4, patience: 2}]"],
        4,
        "it needs 5 values of actor/entropy (window 4, patience 2), and 4 steps give at most 4.",
    ),
    "a critic that warms up": (
        ["guard.entropy={window: 4, action: stop}", "trainer.critic_warmup=7"],
        10,
        "10 steps give at most 3.",
    ),
    "evaluations": (
        ["guard.rules=[{metric: val/a, below: 0.1, window: 4}]", "trainer.test_freq=5"],
        12,
        "12 steps give at most 3.",
    ),
    "a run without an end in steps": (["guard.reward={window: 20, action: stop}"], None, None),
    "a single update": (
        ["guard.kl.action=skip_step"],
        100,
        "guard.kl cannot act in this run: actor/ppo_kl is 0 with a single update a step",
    ),
    "two mini-batches": (["guard.kl.action=skip_step", "actor.ppo_mini_batch_size=4"], 100, None),
    "two epochs": (["guard.kl.action=skip_step", "actor.ppo_epochs=2"], 100, None),
    "old log-probs of their own": (["guard.kl.action=skip_step", "algorithm.use_kl_in_reward=true"], 100, None),
    "a bound that 0 breaks": (["guard.rules=[{metric: actor/ppo_kl, below: 0.1}]"], 100, None),
    "a guard that is switched off": (["guard.kl.action=none"], 100, None),
}


@pytest.mark.parametrize(("overrides", "steps", "words"), NOTES.values(), ids=NOTES.keys())
def test_what_cannot_act_in_this_run_is_noted(
    overrides: list[str], steps: int | None, words: str | None, config: Path
) -> None:
    notes = list(guard_notes(load_config(config, overrides), steps))
    assert len(notes) == (words is not None)
    assert all(words in note and note.startswith("note: ") for note in notes)
