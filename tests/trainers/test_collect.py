"""The samples of a step: dynamic sampling, the penalty for length, ReMax's baselines, and PF-PPO."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.spawn import run_ranks
from tests.trainers.outcomes import DONE, is_one_sentence, outcomes
from tests.trainers.rollouts import dumped, evaluated
from tests.trainers.tiny_run import make_tiny_run, read_metrics

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Samples of prompts 0, 3, 6, … all score the same; `told` differs between those of prompts 2, 7, 12, … alone."""
    number, place = sum(map(ord, solution_str)), extra_info["index"]
    score = 0.5 if place % 3 == 0 else number % 17 / 16
    return {"score": score, "told": number % 17 if place % 5 == 2 else 1.0}
'''
SCORE_DIFFERS = [place for place in range(16) if place % 3]
TOLD_DIFFERS = [2, 7, 12]

FILTERED = ["algorithm.filter_groups.enable=true", "data.shuffle=false"]
FEW = ["algorithm.filter_groups.max_num_gen_batches=1", "algorithm.filter_groups.on_exhausted=smaller_batch"]
RUNS = {
    "filtered": ["trainer.total_training_steps=2"],
    "few": FEW,
    "by told": ["algorithm.filter_groups.metric=told", "data.train_batch_size=2"],
}
BUFFER, PENALTY, LIMIT = 6, 0.5, 12
OVERLONG = [
    "reward.overlong_buffer.enable=true",
    f"reward.overlong_buffer.len={BUFFER}",
    f"reward.overlong_buffer.penalty_factor={PENALTY}",
]
BEST_ONLY = [
    "algorithm.adv_estimator=reinforce_plus_plus",
    "algorithm.pf_ppo.enable=true",
    "algorithm.pf_ppo.weight_pow=250",
    "reward.rule_weight=16",  # makes scores whole numbers, whose powers are far apart
]
FRUITLESS = {
    "too few": FEW[:1],
    "none": [*FEW, "algorithm.filter_groups.metric=told", "data.train_batch_size=2"],
    "no such number": ["algorithm.filter_groups.metric=accuracy"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run with its dump; those with dynamic sampling on two ranks too, in the folder `2`."""
    folder = tmp_path_factory.mktemp("collect")
    config = make_tiny_run(folder, checkpoint={"export_hf": False})
    (folder / "reward.py").write_text(REWARD)
    evaluates = [f"data.val_files={folder / 'train.parquet'}", "trainer.val_before_train=true"]
    alone = {
        "overlong": OVERLONG,
        "remax": ["algorithm.adv_estimator=remax", "rollout.n=2", *evaluates],
        "best only": BEST_ONLY,
    }
    filtered = {name: [*FILTERED, *overrides] for name, overrides in (RUNS | FRUITLESS).items()}
    for ranks, runs in ((1, filtered | alone), (2, filtered)):
        output = folder / f"{ranks}"
        dumping = {name: [*run, f"trainer.rollout_data_dir={output / name / 'dump'}"] for name, run in runs.items()}
        for found in run_ranks(outcomes, ranks, config, output, dumping, timeout=200.0):
            assert {name for name, outcome in found.items() if outcome == DONE} == runs.keys() - FRUITLESS.keys()
        (output / "outcomes.json").write_text(json.dumps(found))
    return folder


def places(samples: list[dict[str, Any]]) -> list[int]:
    """Which prompts were trained on, in order."""
    return [sample["prompt"]["extra_info"]["index"] for sample in samples if sample["index"] == 0]


def graded(folder: Path) -> Callable[[dict[str, Any]], float]:
    """The reward function, called here."""
    specification = importlib.util.spec_from_file_location("reward", folder / "reward.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return lambda sample: module.compute_score("", sample["response_text"], "", sample["prompt"]["extra_info"])["score"]


def test_dynamic_sampling_trains_on_the_first_groups_that_differ(folder: Path) -> None:
    first, second = (dumped(folder / "1" / "filtered" / "dump", step) for step in (1, 2))
    assert places(first) == SCORE_DIFFERS[:4] == [1, 2, 4, 5]
    assert places(second) == [8, 10, 11, 13]  # prompts 8 to 11 have three such groups, so 12 to 15 are drawn too
    for samples in (first, second):
        assert [(sample["group"], sample["index"]) for sample in samples] == [
            (g, i) for g in range(4) for i in range(4)
        ]
        assert all(len({s["rewards"]["score"] for s in samples if s["group"] == g}) > 1 for g in range(4))


def test_it_draws_batches_until_there_are_enough(folder: Path) -> None:
    first, second = read_metrics(folder / "1" / "filtered")
    assert first["group/gen_batches"] == second["group/gen_batches"] == 2
    assert first["group/kept_fraction"] == 5 / 8  # of prompts 0 to 7: 1, 2, 4, 5 and 7
    assert first["group/zero_variance_fraction"] == 0


def test_too_few_groups_are_a_smaller_batch_where_that_is_wanted(folder: Path) -> None:
    samples = dumped(folder / "1" / "few" / "dump")
    assert places(samples) == [1, 2]
    (found,) = read_metrics(folder / "1" / "few")
    scores = [sample["rewards"]["score"] for sample in samples]
    assert found["critic/score/mean"] == pytest.approx(sum(scores) / 8)
    assert found["actor/grad_norm"] > 0


def test_groups_may_be_compared_by_another_number_of_the_reward_function(folder: Path) -> None:
    assert places(dumped(folder / "1" / "by told" / "dump")) == TOLD_DIFFERS[:2]
    assert read_metrics(folder / "1" / "by told")[0]["group/gen_batches"] == 4


@pytest.mark.parametrize("name", RUNS)
def test_the_layout_does_not_decide_which_groups_are_kept(folder: Path, name: str) -> None:
    expected, found = (dumped(folder / ranks / name / "dump") for ranks in ("1", "2"))
    for one, two in zip(expected, found, strict=True):
        assert two.pop("rollout_logprobs") == pytest.approx(one.pop("rollout_logprobs"), abs=1e-4)
        assert one == two


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_search_that_finds_too_few_useful_groups_ends_in_a_sentence(folder: Path, ranks: str) -> None:
    found = json.loads((folder / ranks / "outcomes.json").read_text())
    assert "algorithm.filter_groups: step 1 found 2 of 4 prompts" in found["too few"]
    assert "max_num_gen_batches" in found["too few"]
    assert "found 0 of 2 prompts whose samples differ in told after 1 batches" in found["none"]
    assert "algorithm.filter_groups.metric is accuracy" in found["no such number"]
    assert "score, told" in found["no such number"]
    assert all(is_one_sentence(found[name]) for name in FRUITLESS)


def test_the_penalty_for_length_falls_from_the_buffer_to_the_limit(folder: Path) -> None:
    samples, grade = dumped(folder / "1" / "overlong" / "dump"), graded(folder)
    lengths = [len(sample["response_ids"]) for sample in samples]
    assert LIMIT in lengths and min(lengths) < LIMIT
    for length, sample in zip(lengths, samples, strict=True):
        penalty = 0.0 if length <= LIMIT - BUFFER else -PENALTY * (length - (LIMIT - BUFFER)) / BUFFER
        assert sample["rewards"]["overlong"] == pytest.approx(penalty)
        assert sample["rewards"]["score"] == pytest.approx(grade(sample) + penalty)


def test_remax_subtracts_the_score_of_the_greedy_answer(folder: Path) -> None:
    """Which is what the evaluation of the same prompts with the same weights finds."""
    samples = dumped(folder / "1" / "remax" / "dump")
    greedy = {json.dumps(line["prompt"]): line["score"] for line in evaluated(folder / "1" / "remax")}
    assert [sample["rewards"]["baseline"] for sample in samples] == [
        greedy[json.dumps(sample["prompt"]["messages"])] for sample in samples
    ]
    assert len({sample["rewards"]["baseline"] for sample in samples}) > 1
    _, found = read_metrics(folder / "1" / "remax")
    ahead = [sample["rewards"]["score"] - sample["rewards"]["baseline"] for sample in samples]
    assert (found["critic/advantages/max"], found["critic/advantages/min"]) == pytest.approx((max(ahead), min(ahead)))


def test_with_a_large_power_pf_ppo_trains_on_the_best_samples_alone(folder: Path) -> None:
    scores = [sample["rewards"]["score"] for sample in dumped(folder / "1" / "best only" / "dump")]
    best = max(scores)
    assert 0 < scores.count(best) < len(scores)
    (found,) = read_metrics(folder / "1" / "best only")
    assert found["critic/score/min"] == found["critic/score/max"] == best
    assert 0 < found["pf_ppo/distinct_fraction"] <= scores.count(best) / len(scores)
