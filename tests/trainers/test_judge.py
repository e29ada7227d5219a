"""A reward model in RL scores what transformers scores, and its score and the graders' add up as weighted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.data.chat_models import INST, make_chat_model
from tests.spawn import run_ranks
from tests.tiny_models import make_hf_model
from tests.trainers.outcomes import DONE, outcomes
from tests.trainers.rollouts import dumped, evaluated
from tests.trainers.tiny_run import make_tiny_run, read_metrics

RULE_WEIGHT, JUDGE_WEIGHT = 0.5, 2.0
LAYOUTS = {1: {"one": []}, 2: {"TP2": ["parallel.tensor_model_parallel_size=2"], "DP2": []}}
SHORT = 52
"""Tokens of the longest sample of the actor, and the fewest that a judge may be limited to."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step and an evaluation in each layout; then alone, without graders, and with conversations cut."""
    folder = tmp_path_factory.mktemp("judge")
    judge = make_judge(folder / "judge")
    config = make_tiny_run(
        folder,
        trainer={"total_training_steps": 1, "val_before_train": True, "logger": ["jsonl"]},
        reward={
            "custom": {"path": str(folder / "reward.py")},
            "num_workers": 1,
            "rule_weight": RULE_WEIGHT,
            "model": {"path": str(judge), "weight": JUDGE_WEIGHT},
        },
        checkpoint={"export_hf": False},
    )
    alone = ["reward.rule_weight=null", "reward.custom.path=null"]  # no grader knows the data source `sums`
    short = [f"reward.model.max_tokens_per_micro_batch={SHORT}", "trainer.val_before_train=false"]
    for ranks, layouts in LAYOUTS.items():
        runs = layouts | ({"no graders": alone, "short": short} if ranks == 1 else {})
        dumping = {name: [*run, f"trainer.rollout_data_dir={folder / name / 'dump'}"] for name, run in runs.items()}
        for found in run_ranks(outcomes, ranks, config, folder, dumping, timeout=200.0):
            assert found == dict.fromkeys(runs, DONE)
    return folder


def make_judge(folder: Path) -> Path:
    """A reward model of another family than the actor, with another chat template and other token ids."""
    make_chat_model(folder, template=INST, bos="<s>", eos="</s>")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return make_hf_model(
        "llama",
        folder,
        seed=3,
        vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
        auto_class=transformers.AutoModelForSequenceClassification,
        num_labels=1,
    )


class Judge:
    """The reward model in transformers, one conversation at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()

    def conversation(self, messages: list[dict[str, str]], response: str) -> list[int]:
        whole = [*messages, {"role": "assistant", "content": response}]
        return self.tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"]

    @torch.no_grad()
    def score(self, ids: list[int]) -> float:
        # The end token pads too, so that the score is read before it.
        self.model.config.pad_token_id = self.tokenizer.eos_token_id
        return self.model(torch.tensor([ids])).logits.item()


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge(folder / "judge")


def conversation(judge: Judge, sample: dict[str, Any]) -> list[int]:
    return judge.conversation(sample["prompt"]["messages"], sample["response_text"])


def rule(text: str) -> float:
    return sum(map(ord, text)) % 17 / 16


@pytest.mark.parametrize("layout", ["one", "TP2", "DP2", "no graders"])
def test_each_sample_has_the_score_that_transformers_gives_its_conversation(
    folder: Path, judge: Judge, layout: str
) -> None:
    samples = dumped(folder / layout / "dump")
    assert len(samples) == 16
    expected = [judge.score(conversation(judge, sample)) for sample in samples]
    assert [sample["rewards"]["model"] for sample in samples] == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


@pytest.mark.parametrize("layout", ["one", "TP2", "DP2"])
def test_the_score_that_is_trained_on_is_the_weighted_sum(folder: Path, layout: str) -> None:
    samples = dumped(folder / layout / "dump")
    for rewards in (sample["rewards"] for sample in samples):
        assert rewards["score"] == pytest.approx(RULE_WEIGHT * rewards["rule"] + JUDGE_WEIGHT * rewards["model"])
    assert [sample["rewards"]["rule"] for sample in samples] == [rule(sample["response_text"]) for sample in samples]
    found = read_metrics(folder / layout)[1]
    for metric, name in {"critic/score": "score", "reward/rule": "rule", "reward/model": "model"}.items():
        mean = sum(sample["rewards"][name] for sample in samples) / len(samples)
        assert found[f"{metric}/mean"] == pytest.approx(mean), metric


def test_without_graders_the_reward_model_alone_scores(folder: Path) -> None:
    """Rows whose data source no grader knows are welcome then."""
    for sample in dumped(folder / "no graders" / "dump"):
        assert sample["rewards"]["score"] == pytest.approx(JUDGE_WEIGHT * sample["rewards"]["model"])
        assert sample["prompt"]["data_source"] == "sums"
        assert sample["reward_failure"] is None


@pytest.mark.parametrize("layout", ["one", "TP2", "DP2"])
def test_evaluations_report_the_score_and_both_parts(folder: Path, judge: Judge, layout: str) -> None:
    answers, found = evaluated(folder / layout), read_metrics(folder / layout)[0]
    mean = lambda numbers: pytest.approx(sum(numbers) / len(answers), abs=1e-5)
    models = [judge.score(judge.conversation(answer["prompt"], answer["response"])) for answer in answers]
    rules = [rule(answer["response"]) for answer in answers]
    assert found["val-core/sums/model/mean@1"] == mean(models)
    assert found["val-core/sums/rule/mean@1"] == mean(rules)
    assert found["val-core/sums/reward/mean@1"] == mean(
        RULE_WEIGHT * by_rule + JUDGE_WEIGHT * by_model for by_rule, by_model in zip(rules, models, strict=True)
    )


def test_conversations_that_are_too_long_are_cut_behind_their_first_token(folder: Path, judge: Judge) -> None:
    samples = dumped(folder / "short" / "dump")
    wholes = [conversation(judge, sample) for sample in samples]
    assert any(len(ids) > SHORT for ids in wholes)
    for ids, sample in zip(wholes, samples, strict=True):
        cut = ids if len(ids) <= SHORT else [ids[0], *ids[len(ids) - SHORT + 1 :]]
        assert sample["rewards"]["model"] == pytest.approx(judge.score(cut), abs=1e-5)
