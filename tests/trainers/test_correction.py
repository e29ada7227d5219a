"""Engine correction in a training step, on rollouts whose engine was off by known amounts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
import transformers

from tests.spawn import run_ranks
from tests.trainers.outcomes import DONE, is_one_sentence, outcomes
from tests.trainers.tiny_run import make_tiny_run, read_metrics

GROUPS, SAMPLES = 4, 4
NEVER, ALWAYS, EVERY_OTHER = "never", "always", "every other"
SHIFTS = {NEVER: [0.0], ALWAYS: [0.3], EVERY_OTHER: [-1.0, 0.0]}
"""What the engine's log-probs are above the trainer's, token by token, over and over."""


@dataclass(kw_only=True)
class Response:
    """One response of the hand-made rollouts."""

    prompt: list[int]
    tokens: list[int]
    score: float
    shifts: list[float]
    advantage: float = 0.0

    @property
    def ratios(self) -> list[float]:
        """Trainer ÷ engine."""
        return [math.exp(-shift) for shift in self.shifts]


Weigh = Callable[[Response], list[float]]
"""What is left of each token: its weight, or NaN where it is rejected."""

BAND = (0.9, 2.0)
K1, K2, K3 = 1.5, 0.1, 0.1  # thresholds, between those of the two shifts


def truncated(response: Response) -> list[float]:
    return [min(ratio, 2.0) for ratio in response.ratios]


def truncated_product(response: Response) -> list[float]:
    return [min(math.prod(response.ratios), 2.0)] * len(response.tokens)


def inside_the_band(response: Response) -> list[float]:
    return [ratio if BAND[0] <= ratio <= BAND[1] else 0.0 for ratio in response.ratios]


def near_tokens(response: Response) -> list[float]:
    return [1.0 if 1 / K1 <= ratio <= K1 else math.nan for ratio in response.ratios]


def near_responses(response: Response) -> list[float]:
    mean = math.exp(fmean(response.shifts))
    return [1.0 if 1 / K1 <= mean <= K1 else math.nan] * len(response.tokens)


def small_squares(response: Response) -> list[float]:
    return [1.0 if shift**2 / 2 <= K2 else math.nan for shift in response.shifts]


def small_divergence_of_responses(response: Response) -> list[float]:
    mean = fmean(math.exp(-shift) - 1 + shift for shift in response.shifts)
    return [1.0 if mean <= K3 else math.nan] * len(response.tokens)


def truncated_near_tokens(response: Response) -> list[float]:
    return [a * b for a, b in zip(truncated(response), near_tokens(response), strict=True)]


WEIGHTS: dict[str, tuple[dict[str, object], Weigh]] = {
    "token": ({"rollout_is": "token"}, truncated),
    "sequence": ({"rollout_is": "sequence"}, truncated_product),
    "band": ({"rollout_is": "token", "rollout_is_lower": BAND[0]}, inside_the_band),
}
REJECTIONS: dict[str, tuple[dict[str, object], Weigh]] = {
    "token_k1": ({"rollout_rs": "token_k1", "rollout_rs_threshold": K1}, near_tokens),
    "sequence_k1": ({"rollout_rs": "sequence_k1", "rollout_rs_threshold": K1}, near_responses),
    "token_k2": ({"rollout_rs": "token_k2", "rollout_rs_threshold": K2}, small_squares),
    "sequence_k3": ({"rollout_rs": "sequence_k3", "rollout_rs_threshold": K3}, small_divergence_of_responses),
    "both": (
        {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": K1},
        truncated_near_tokens,
    ),
}
RUNS = WEIGHTS | REJECTIONS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of one update for each way to correct, all on the same rollouts; and on rollouts without log-probs."""
    folder = tmp_path_factory.mktemp("correction")
    config = make_tiny_run(
        folder,
        data={
            "train_files": str(folder / "train.parquet"),
            "train_batch_size": GROUPS,
            "max_prompt_length": 40,
            "max_response_length": 12,
        },
        actor={"ppo_mini_batch_size": GROUPS, "max_tokens_per_micro_batch": 128, "loss_agg_mode": "token-mean"},
        rollout={"n": SAMPLES},
        checkpoint={"export_hf": False},
    )
    responses = make_responses()
    known = logprobs(folder, responses)
    write(folder / "shifted", responses, known)
    write(folder / "unknown", responses, [[math.nan] * len(row) for row in known])
    corrected = {
        name: [f"algorithm.rollout_correction.{key}={value}" for key, value in settings.items()]
        for name, (settings, _) in RUNS.items()
    }
    runs = {name: [f"rollout.replay_dir={folder / 'shifted'}", *keys] for name, keys in corrected.items()}
    unknown = f"rollout.replay_dir={folder / 'unknown'}"
    runs |= {"unknown": [unknown], "unknown corrected": [unknown, *corrected["token"]]}
    (found,) = run_ranks(outcomes, 1, config, folder, runs, timeout=200.0)
    assert {name for name, outcome in found.items() if outcome != DONE} == {"unknown corrected"}
    (folder / "outcomes.json").write_text(json.dumps(found))
    return folder


def make_responses() -> list[Response]:
    """Random tokens, of several lengths; advantages are those of GRPO."""
    numbers, kinds = random.Random(0), [NEVER, ALWAYS, EVERY_OTHER, ALWAYS, EVERY_OTHER]
    responses = []
    for _ in range(GROUPS):
        prompt = [numbers.randrange(5, 250) for _ in range(numbers.randint(4, 9))]
        group = []
        for index in range(SAMPLES):
            tokens = [numbers.randrange(5, 250) for _ in range(numbers.randint(5, 12))]
            pattern = SHIFTS[kinds[(len(responses) + index) % len(kinds)]]
            shifts = [pattern[place % len(pattern)] for place in range(len(tokens))]
            group.append(Response(prompt=prompt, tokens=tokens, score=numbers.random(), shifts=shifts))
        scores = [response.score for response in group]
        for response in group:
            response.advantage = (response.score - fmean(scores)) / (stdev(scores) + 1e-6)
        responses += group
    return responses


def row_logprobs(model: torch.nn.Module, response: Response) -> torch.Tensor:
    logits = model(torch.tensor([response.prompt + response.tokens])).logits[0, len(response.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response.tokens).unsqueeze(1)).squeeze(1)


@torch.no_grad()
def logprobs(folder: Path, responses: Sequence[Response]) -> list[list[float]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    return [row_logprobs(model, response).tolist() for response in responses]


def write(folder: Path, responses: Sequence[Response], known: Sequence[Sequence[float]]) -> None:
    """The responses as a dump of rollouts; `known` log-probs are moved by the shifts."""
    lines = [
        {
            "prompt": {"row": 0, "token_ids": response.prompt, "messages": [], "data_source": "sums"},
            "group": place // SAMPLES,
            "index": place % SAMPLES,
            "response_ids": response.tokens,
            "response_mask": [1] * len(response.tokens),
            "rollout_logprobs": [value + shift for value, shift in zip(row, response.shifts, strict=True)],
            "finish_reason": "stop",
            "weight_version": 0,
            "rewards": {"score": response.score},
        }
        for place, (response, row) in enumerate(zip(responses, known, strict=True))
    ]
    (folder / "step-000001").mkdir(parents=True)
    (folder / "step-000001" / "rank-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def weights_by_hand(name: str) -> list[list[float]]:
    return [RUNS[name][1](response) for response in make_responses()]


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weights_of_tokens_are_those_computed_by_hand(folder: Path, name: str) -> None:
    (found,) = read_metrics(folder / name)
    weights = [weight for row in weights_by_hand(name) for weight in row]
    squares = sum(weight**2 for weight in weights)
    assert found["rollout_corr/rollout_is_mean"] == pytest.approx(fmean(weights), rel=1e-4)
    assert found["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        sum(weights) ** 2 / (len(weights) * squares), rel=1e-4
    )
    outside = sum(weight in (0.0, 2.0) for weight in weights)
    assert found["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(outside / len(weights))
    assert 0 < outside < len(weights)


@pytest.mark.parametrize("name", REJECTIONS)
def test_the_tokens_that_are_left_out_are_those_found_by_hand(folder: Path, name: str) -> None:
    (found,) = read_metrics(folder / name)
    rejected = [math.isnan(weight) for row in weights_by_hand(name) for weight in row]
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(fmean(rejected))
    assert 0 < sum(rejected) < len(rejected)


@pytest.mark.parametrize("name", RUNS)
def test_loss_and_gradient_are_those_of_the_weighted_tokens_that_are_left(folder: Path, name: str) -> None:
    """With one update the ratio is 1: the loss of a token is −A, and its gradient that of −A·log-prob."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    rows = weights_by_hand(name)
    left = sum(not math.isnan(weight) for row in rows for weight in row)
    loss, surrogate = 0.0, torch.zeros(())
    for response, weights in zip(make_responses(), rows, strict=True):
        factors = torch.tensor(weights).nan_to_num(0.0) * -response.advantage / left
        loss += factors.sum().item()
        surrogate = surrogate + (factors * row_logprobs(model, response)).sum()
    surrogate.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    (found,) = read_metrics(folder / name)
    assert found["actor/pg_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert found["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert found["actor/ppo_kl"] == 0


def test_the_gap_is_measured_whatever_is_done_about_it(folder: Path) -> None:
    shifts = [shift for response in make_responses() for shift in response.shifts]
    expected = {
        "logprob_diff_mean": fmean(map(abs, shifts)),
        "logprob_diff_max": 1.0,
        "kl": fmean(shifts),
        "k3_kl": fmean(math.exp(-shift) - 1 + shift for shift in shifts),
        "chi2_token": fmean(math.exp(-2 * shift) for shift in shifts) - 1,
    }
    for name in RUNS:
        (found,) = read_metrics(folder / name)
        for metric, value in expected.items():
            assert found[f"rollout_corr/{metric}"] == pytest.approx(value, rel=1e-4, abs=1e-6), metric


def test_rollouts_without_log_probs_cannot_be_corrected(folder: Path) -> None:
    message = json.loads((folder / "outcomes.json").read_text())["unknown corrected"]
    assert "algorithm.rollout_correction" in message
    tokens = sum(len(response.tokens) for response in make_responses())
    assert f"{tokens} of {tokens} response tokens have no rollout log-prob" in message
    assert is_one_sentence(message)


def test_without_log_probs_and_without_correction_nothing_is_said_of_the_gap(folder: Path) -> None:
    (found,) = read_metrics(folder / "unknown")
    assert not [name for name in found if name.startswith(("rollout_corr/", "training/rollout"))]
    assert found["actor/grad_norm"] > 0
