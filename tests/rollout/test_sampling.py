"""Drawing tokens, compared with transformers' own logits processors and with exact probabilities."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megarl.rollout.engine import SamplingParams
from megarl.rollout.sampling import draw, stream_keys, uniforms

CUTS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 10_000},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.6},
]
IDS = [" ".join(f"{key}={value}" for key, value in cut.items()) or "plain" for cut in CUTS]


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"n": 1, "max_new_tokens": 1, "seed": 0, "stop_token_ids": (), **changes})


def exact(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Probabilities of one row, [vocabulary] float64, by transformers' processors in transformers' order."""
    scores = logits.double().unsqueeze(0)
    processors = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k != -1:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    for processor in processors:
        scores = processor(None, scores)
    return scores.softmax(-1)[0]


def draw_often(logits: torch.Tensor, sampling: SamplingParams, times: int) -> tuple[torch.Tensor, torch.Tensor]:
    uniform = uniforms(stream_keys([3] * times, range(times)), [0] * times)
    return draw(logits.expand(times, -1).clone(), [sampling] * times, uniform)


def chi_square_p_value(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Cells that expect less than 5 are one cell, as the test's approximation needs."""
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    counts = torch.cat([counts[~rare], counts[rare].sum().view(1)])
    used = expected > 0
    if used.sum() == 1:
        return 1.0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    return torch.special.gammaincc((used.sum() - 1) / 2, statistic / 2).item()


@pytest.mark.parametrize(
    "vocabulary", [7, 256, 300, 700]
)  # below, at, above and well above a block of the cumulative sum
@pytest.mark.parametrize("cut", CUTS, ids=IDS)
def test_tokens_come_as_often_as_their_probabilities_say(cut: dict, vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 2
    sampling = params(**cut)
    tokens, _ = draw_often(logits, sampling, 8_000)
    probabilities = exact(logits, sampling)
    assert (probabilities[tokens] > 0).all()  # nothing that was cut
    assert chi_square_p_value(tokens, probabilities) > 1e-3


@pytest.mark.parametrize("cut", CUTS, ids=IDS)
def test_logprobs_are_of_the_distribution_that_was_drawn_from(cut: dict) -> None:
    logits = torch.randn(700, generator=torch.Generator().manual_seed(2)) * 3
    sampling = params(**cut)
    tokens, logprobs = draw_often(logits, sampling, 500)
    torch.testing.assert_close(logprobs.double(), exact(logits, sampling)[tokens].log(), atol=2e-6, rtol=1e-5)


def test_greedy_takes_the_likeliest_token_and_tells_its_logprob_at_temperature_1() -> None:
    logits = torch.randn(5, 300) * 3
    tokens, logprobs = draw(logits.clone(), [params(temperature=0.0)] * 5, torch.zeros(5, dtype=torch.float64))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_rows_with_different_settings_are_drawn_as_they_would_be_alone() -> None:
    settings = [params(**cut) for cut in CUTS] + [params(temperature=0.0)]
    logits = torch.randn(len(settings), 700) * 3
    uniform = torch.linspace(0.05, 0.95, len(settings), dtype=torch.float64)
    together = draw(logits.clone(), settings, uniform)
    for row, sampling in enumerate(settings):
        alone = draw(logits[row : row + 1].clone(), [sampling], uniform[row : row + 1])
        assert together[0][row] == alone[0]
        torch.testing.assert_close(together[1][row], alone[1][0])


@pytest.mark.parametrize("spread", [0.01, 2.5])  # the 0.9 are some 4,500 tokens, and some 550
def test_top_p_is_a_share_of_a_vocabulary_larger_than_what_it_looks_at_first(spread: float) -> None:
    logits = torch.randn(5_000, generator=torch.Generator().manual_seed(4)) * spread
    sampling = params(top_p=0.9)
    tokens, logprobs = draw_often(logits, sampling, 2_000)
    torch.testing.assert_close(logprobs.double(), exact(logits, sampling)[tokens].log(), atol=2e-6, rtol=1e-5)
    assert tokens.unique().numel() > 300


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-52])
@pytest.mark.parametrize("vocabulary", [7, 512, 700])
def test_the_ends_of_the_cumulative_sum_do_not_fall_off(uniform: float, vocabulary: int) -> None:
    logits = torch.randn(1, vocabulary)
    logits[0, 0] = logits[0, -1] = -1e4  # probability 0
    token, logprob = draw(logits, [params()], torch.tensor([uniform], dtype=torch.float64))
    assert token.item() == (1 if uniform == 0 else vocabulary - 2)
    assert torch.isfinite(logprob).all()


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    for sampling in (params(), params(top_k=3), params(top_p=0.5), params(temperature=0.0)):
        _, logprob = draw(torch.full((1, 300), float("nan")), [sampling], torch.tensor([0.5], dtype=torch.float64))
        assert not torch.isfinite(logprob).any()


def test_random_numbers_are_uniform_and_differ_by_seed_index_and_position() -> None:
    seeds, indices, positions = torch.cartesian_prod(torch.arange(20), torch.arange(20), torch.arange(20)).unbind(1)
    numbers = uniforms(stream_keys(seeds.tolist(), indices.tolist()), positions.tolist())
    assert numbers.unique().numel() == 8_000
    assert chi_square_p_value((numbers * 50).long(), torch.full((50,), 1 / 50)) > 1e-3
    neighbours = torch.stack([numbers[:-1], numbers[1:]])
    assert abs(torch.corrcoef(neighbours)[0, 1].item()) < 0.05


@pytest.mark.parametrize(
    "wrong", [{"n": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}]
)
def test_settings_without_a_distribution_are_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        params(**wrong)
