"""Runs with a person's own estimator and loss, by name from a file."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest

from tests.spawn import run_ranks
from tests.trainers.outcomes import DONE, is_one_sentence, outcomes
from tests.trainers.rollouts import dumped
from tests.trainers.tiny_run import make_tiny_run, read_metrics

PLUGIN = """
from megarl.algorithms.advantages import Advantages, advantage_estimator
from megarl.algorithms.policy_loss import policy_loss
from megarl.algorithms.tokens import TokenLoss


@advantage_estimator("less_the_mean", needs_groups=True, row_level=True)
def less_the_mean(inputs, options):
    rewards = inputs.rewards.sum(dim=1)
    advantages = inputs.mask.float()
    for row, group in enumerate(inputs.groups.tolist()):
        advantages[row] *= rewards[row] - rewards[inputs.groups == group].mean()
    return Advantages(advantages=advantages, returns=advantages)


def letters_less_greedy(inputs, options):
    rows = inputs.rewards_by_name["letters"] * inputs.reward_weights["letters"] - inputs.baseline
    advantages = rows.float().unsqueeze(1) * inputs.mask
    return Advantages(advantages=advantages, returns=advantages)


needs = {"needs_baseline": True, "needs_rewards_by_name": True}
advantage_estimator("of_rows", row_level=True, **needs)(letters_less_greedy)
advantage_estimator("of_tokens", **needs)(letters_less_greedy)


@policy_loss("squared_ratio")
def squared_ratio(inputs, options):
    log_ratio = (inputs.logprobs - inputs.old_logprobs) * inputs.mask
    loss = -inputs.advantages * (2 * log_ratio).exp() * inputs.mask
    return TokenLoss(loss=loss, sums={"actor/ppo_kl": -log_ratio.detach().sum()})
"""
BROKEN = """
import math

import torch

from megarl.algorithms.advantages import Advantages, advantage_estimator
from megarl.algorithms.policy_loss import policy_loss
from megarl.algorithms.tokens import TokenLoss

same = lambda values: Advantages(advantages=values, returns=values)
estimators = {
    "gives_nothing": lambda inputs: None,
    "gives_a_tensor": lambda inputs: inputs.rewards,
    "gives_a_row_less": lambda inputs: same(inputs.rewards[1:]),
    "gives_nan": lambda inputs: same(torch.full_like(inputs.rewards, math.nan)),
}
for name, give in estimators.items():
    advantage_estimator(name, row_level=True)(lambda inputs, options, give=give: give(inputs))
losses = {
    "loss_of_one_number": lambda inputs: TokenLoss(loss=inputs.logprobs.sum()),
    "loss_without_gradient": lambda inputs: TokenLoss(loss=inputs.advantages.clone()),
    "loss_with_a_new_metric": lambda inputs: TokenLoss(loss=inputs.logprobs, sums={"mine": inputs.mask.sum()}),
    "loss_of_no_kind": lambda inputs: inputs.logprobs,
}
for name, give in losses.items():
    policy_loss(name)(lambda inputs, options, give=give: give(inputs))
"""
BROKEN_NAMES = {
    "gives_nothing": ["NoneType", "must return Advantages"],
    "gives_a_tensor": ["Tensor", "must return Advantages"],
    "gives_a_row_less": ["shape [15, 1]", "[16, 1]"],
    "gives_nan": ["NaN or infinite"],
    "loss_of_one_number": ["shape []", "one for each token"],
    "loss_without_gradient": ["without a gradient", "inputs.logprobs"],
    "loss_with_a_new_metric": ["the metric mine", "actor/ppo_kl"],
    "loss_of_no_kind": ["Tensor", "must return TokenLoss"],
}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": sum(map(ord, solution_str)) % 17 / 16.0, "letters": sum(map(str.isalpha, solution_str))}
"""
LETTER = 0.25
BUILT_IN = ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std=false", "actor.policy_loss=reinforce"]
OWN = ["algorithm.adv_estimator=less_the_mean", "actor.policy_loss=squared_ratio"]
ASKS = {
    name: [
        f"algorithm.adv_estimator={name}",
        "algorithm.gdpo_reward_keys=[letters]",
        f"algorithm.gdpo_reward_weights=[{LETTER}]",
    ]
    for name in ("of_rows", "of_tokens")
}
FAULTY = {
    "fails": "import nothing_of_this_name\n",
    "registers nothing": "GAMMA = 1.0\n",
    "takes other arguments": (
        "from megarl.algorithms.policy_loss import policy_loss\n"
        "@policy_loss('other_arguments')\n"
        "def other_arguments(logprobs): ...\n"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with built-in names and with own ones, and such that cannot be."""
    folder = tmp_path_factory.mktemp("plugins")
    # One update whose gradient is not clipped, so that its size shows.
    config = make_tiny_run(
        folder,
        actor={"ppo_mini_batch_size": 4, "max_tokens_per_micro_batch": 128},
        optim={"lr": 1e-3, "eps": 1e-4, "clip_grad": 1e6},
        checkpoint={"export_hf": False},
    )
    (folder / "reward.py").write_text(REWARD)
    (folder / "mine.py").write_text(PLUGIN)
    (folder / "broken.py").write_text(BROKEN)
    for name, text in FAULTY.items():
        (folder / f"{name}.py").write_text(text)
    runs = {
        "built-in": BUILT_IN,
        "own": OWN,
        **{name: [*asks, f"trainer.rollout_data_dir={folder / name / 'dump'}"] for name, asks in ASKS.items()},
        "gdpo": [
            "algorithm.adv_estimator=gdpo",
            "algorithm.gdpo_reward_keys=[score,letters]",
            f"trainer.rollout_data_dir={folder / 'gdpo' / 'dump'}",
        ],
        "unknown estimator": ["algorithm.adv_estimator=less_the_median"],
        "unknown loss": ["actor.policy_loss=cubed_ratio"],
        "a group of one": [*OWN, "rollout.n=1"],
        "no greedy answers": [*ASKS["of_rows"], f"rollout.replay_dir={folder / 'of_rows' / 'dump'}"],
        "no names": ASKS["of_rows"][:1],
    }
    with_plugin = {name: [*run, f"algorithm.plugins=[{folder / 'mine.py'}]"] for name, run in runs.items()}
    faulty = {name: [f"algorithm.plugins=['{folder / name}.py']"] for name in FAULTY}
    broken = {
        name: [
            f"{'actor.policy_loss' if name.startswith('loss') else 'algorithm.adv_estimator'}={name}",
            f"algorithm.plugins=[{folder / 'broken.py'}]",
        ]
        for name in BROKEN_NAMES
    }
    (found,) = run_ranks(outcomes, 1, config, folder, with_plugin | faulty | broken)
    assert {name for name, outcome in found.items() if outcome == DONE} == {"built-in", "own", "gdpo", *ASKS}
    (folder / "outcomes.json").write_text(json.dumps(found))
    return folder


def test_an_estimator_and_a_loss_from_a_file_are_used_by_name(folder: Path) -> None:
    """This loss has twice the gradient of the plain policy gradient where the ratio is 1."""
    (built_in,), (own,) = (read_metrics(folder / name) for name in ("built-in", "own"))
    for name in ("critic/advantages/mean", "critic/advantages/max", "critic/advantages/min"):
        assert own[name] == pytest.approx(built_in[name], abs=1e-6), name
    assert own["critic/advantages/max"] > 0
    assert own["actor/grad_norm"] == pytest.approx(2 * built_in["actor/grad_norm"], rel=1e-4)
    assert own["actor/ppo_kl"] == 0


@pytest.mark.parametrize("name", ASKS)
def test_an_estimator_gets_the_rewards_that_it_asks_for(folder: Path, name: str) -> None:
    rewards = [sample["rewards"] for sample in dumped(folder / name / "dump")]
    expected = [reward["letters"] * LETTER - reward["baseline"] for reward in rewards]
    (found,) = read_metrics(folder / name)
    assert found["critic/advantages/max"] == pytest.approx(max(expected))
    assert found["critic/advantages/min"] == pytest.approx(min(expected))


def test_gdpo_gets_its_rewards_in_the_same_way(folder: Path) -> None:
    """GRPO's advantage of each, added, and whitened over the tokens of the step (arXiv:2601.05242)."""
    samples = dumped(folder / "gdpo" / "dump")
    sums = [0.0] * len(samples)
    for name in ("score", "letters"):
        for start in range(0, len(samples), 4):
            group = [sample["rewards"][name] for sample in samples[start : start + 4]]
            for place, reward in enumerate(group, start):
                sums[place] += (reward - fmean(group)) / (stdev(group) + 1e-6)
    tokens = [total for total, sample in zip(sums, samples, strict=True) for _ in sample["response_ids"]]
    (found,) = read_metrics(folder / "gdpo")
    for kind, extreme in (("max", max(tokens)), ("min", min(tokens))):
        assert found[f"critic/advantages/{kind}"] == pytest.approx((extreme - fmean(tokens)) / stdev(tokens), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "unknown estimator": ["algorithm.adv_estimator is 'less_the_median'", "grpo", "less_the_mean"],
        "unknown loss": ["actor.policy_loss is 'cubed_ratio'", "ppo", "squared_ratio"],
        "a group of one": ["algorithm.adv_estimator less_the_mean", "rollout.n is 1"],
        "no greedy answers": ["algorithm.adv_estimator of_rows", "rollout.replay_dir"],
        "no names": ["algorithm.adv_estimator of_rows", "algorithm.gdpo_reward_keys is empty"],
        "fails": ["algorithm.plugins: ", "fails.py, line 1, fails: ModuleNotFoundError"],
        "registers nothing": ["algorithm.plugins: ", "registers nothing.py registers nothing"],
        "takes other arguments": ["algorithm.plugins: ", "'other_arguments'", "(inputs, options)"],
    }.items(),
)
def test_what_cannot_be_run_is_said_in_a_sentence(folder: Path, name: str, words: list[str]) -> None:
    message = json.loads((folder / "outcomes.json").read_text())[name]
    for word in words:
        assert word in message
    assert is_one_sentence(message)


@pytest.mark.parametrize(("name", "words"), BROKEN_NAMES.items())
def test_a_result_that_cannot_be_is_named(folder: Path, name: str, words: list[str]) -> None:
    sentence = json.loads((folder / "outcomes.json").read_text())[name]
    for word in (name, *words):
        assert word in sentence
    assert is_one_sentence(sentence)
