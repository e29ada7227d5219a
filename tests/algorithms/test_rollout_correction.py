"""Engine and trainer compared, token by token in plain Python floats."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from megarl.algorithms.rollout_correction import (
    CORRECTION_LEVELS,
    REJECTION_RULES,
    RolloutCorrection,
    RolloutCorrectionOptions,
    correct,
    finish,
)
from megarl.algorithms.tokens import Sequences
from megarl.config.fields import config_keys
from megarl.config.schema import RunConfig
from tests.algorithms.batches import NAN

ROWS, TIME = 14, 11


def _logprobs() -> tuple[Tensor, Tensor, Tensor]:
    """(trainer's, engine's, mask), NaN under the mask; a row without valid tokens."""
    generator = torch.Generator().manual_seed(6)
    mask = torch.rand(ROWS, TIME, generator=generator) < 0.7
    mask[2] = False
    trainer = -torch.rand(ROWS, TIME, generator=generator) * 3
    engine = trainer + torch.randn(ROWS, TIME, generator=generator) * 0.4
    return trainer.masked_fill(~mask, NAN), engine.masked_fill(~mask, NAN), mask


def _options(**given: str | float | None) -> RolloutCorrectionOptions:
    return RolloutCorrectionOptions(**given)  # type: ignore[arg-type]


def _rows() -> list[tuple[int, list[int], list[float]]]:
    """(row, valid places, trainer − engine there)."""
    trainer, engine, mask = _logprobs()
    found = []
    for row in range(ROWS):
        places = mask[row].nonzero().flatten().tolist()
        found.append((row, places, [trainer[row, t].item() - engine[row, t].item() for t in places]))
    return found


def _metrics(result: RolloutCorrection, options: RolloutCorrectionOptions) -> dict[str, float]:
    number = lambda values: {key: value.item() for key, value in values.items()}
    return finish(number(result.sums), number(result.maxima), options)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lower", [None, 0.8])
def test_weights_are_importance_ratios_cut_or_banded(level: str, lower: float | None) -> None:
    result = correct(*_logprobs(), _options(rollout_is=level, rollout_is_threshold=1.3, rollout_is_lower=lower))
    expected = torch.zeros(ROWS, TIME)
    for row, places, differences in _rows():
        for t, difference in zip(places, differences, strict=True):
            ratio = math.exp(difference if level == "token" else sum(differences))
            inside = lower is None or lower <= ratio <= 1.3
            expected[row, t] = min(ratio, 1.3) if inside else 0.0
    torch.testing.assert_close(result.weights, expected, rtol=1e-5, atol=1e-7)
    assert expected.eq(1.3).any() or lower is not None
    assert torch.equal(result.mask, _logprobs()[2]), "weights reject nothing"


def test_without_correction_weights_are_one_and_everything_is_measured() -> None:
    options = _options()
    result = correct(*_logprobs(), options)
    assert torch.equal(result.weights, _logprobs()[2].float()) and torch.equal(result.mask, _logprobs()[2])
    rows = [differences for _, _, differences in _rows() if differences]
    d = [difference for row in rows for difference in row]
    trainer, engine, mask = _logprobs()
    ratios = [math.exp(x) for x in d]
    expected = {
        "logprob_diff_mean": statistics.fmean(map(abs, d)),
        "logprob_diff_max": max(map(abs, d)),
        "kl": -statistics.fmean(d),
        "k3_kl": statistics.fmean(math.exp(x) - 1 - x for x in d),
        "training_ppl": math.exp(-statistics.fmean(trainer[mask].tolist())),
        "rollout_ppl": math.exp(-statistics.fmean(engine[mask].tolist())),
        "chi2_token": statistics.fmean(ratio**2 for ratio in ratios) - 1,
        "chi2_seq": statistics.fmean(math.exp(sum(row)) ** 2 for row in rows) - 1,
        "rollout_is_eff_sample_size": sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios)),
    }
    assert _metrics(result, options) == pytest.approx(
        {f"rollout_corr/{key}": v for key, v in expected.items()}, rel=1e-5
    )


def test_metrics_of_weights_are_of_those_that_are_applied() -> None:
    options = _options(rollout_is="token", rollout_is_threshold=1.2)
    metrics = _metrics(correct(*_logprobs(), options), options)
    ratios = [math.exp(d) for _, _, row in _rows() for d in row]
    weights = [min(ratio, 1.2) for ratio in ratios]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(statistics.fmean(weights), rel=1e-5)
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(
        sum(ratio > 1.2 for ratio in ratios) / len(ratios)
    )
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights)), rel=1e-5
    )


def _rejects(rule: str, differences: list[float], d: float, threshold: float) -> bool:
    level, name = rule.split("_")
    estimate = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[name]
    value = estimate(d) if level == "token" else statistics.fmean(map(estimate, differences))
    return not 1 / threshold <= math.exp(value) <= threshold if name == "k1" else value > threshold


@pytest.mark.parametrize("rule", [rule for rule in REJECTION_RULES if rule != "none"])
def test_tokens_or_rows_beyond_the_bound_are_rejected(rule: str) -> None:
    threshold = {"token_k1": 1.5, "sequence_k1": 1.1}.get(rule, 0.08)
    options = _options(rollout_rs=rule, rollout_rs_threshold=threshold)
    result = correct(*_logprobs(), options)
    expected = torch.zeros(ROWS, TIME, dtype=torch.bool)
    for row, places, differences in _rows():
        for t, difference in zip(places, differences, strict=True):
            expected[row, t] = not _rejects(rule, differences, difference, threshold)
    assert torch.equal(result.mask, expected)
    valid = _logprobs()[2]
    share = (valid & ~expected).sum().item() / valid.sum().item()
    assert 0.05 < share < 0.95
    assert _metrics(result, options)["rollout_corr/rollout_rs_masked_fraction"] == share


def test_sums_over_packed_parts_are_those_of_the_whole() -> None:
    options = _options(rollout_is="sequence", rollout_rs="sequence_k3", rollout_rs_threshold=0.1)
    trainer, engine, mask = _logprobs()
    whole = correct(trainer, engine, mask, options)
    of_token = torch.arange(ROWS).repeat_interleave(TIME)
    shards = [slice(0, 50), slice(50, 61), slice(61, None)]
    # What the other context-parallel ranks hold of each row's sums, by call: log-ratios first, then the estimate.
    d = torch.where(mask, trainer - engine, 0.0)
    flat = [d.flatten(), (torch.expm1(d) - d).flatten()]
    totals = [torch.zeros(1, ROWS).double().index_add_(1, of_token, values.double().unsqueeze(0)) for values in flat]
    parts = []
    for shard in shards:
        answers = iter(totals)
        sequences = Sequences(of_token=of_token[shard], lengths=mask.sum(1), sum=lambda _, it=answers: next(it))  # type: ignore[misc]
        parts.append(correct(*(x.flatten()[shard] for x in (trainer, engine, mask)), options, sequences))
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), whole.weights.flatten())
    assert torch.equal(torch.cat([part.mask for part in parts]), whole.mask.flatten())
    for key, value in whole.sums.items():
        total = torch.stack([part.sums[key] for part in parts]).sum()
        torch.testing.assert_close(total, value, rtol=1e-6, atol=1e-9)


def test_equal_log_probs_are_no_mismatch() -> None:
    trainer, _, mask = _logprobs()
    options = _options(rollout_is="token", rollout_is_lower=0.5)
    result = correct(trainer, trainer.clone(), mask, options)
    metrics = _metrics(result, options)
    assert torch.equal(result.weights, mask.float())
    for name in ("logprob_diff_mean", "logprob_diff_max", "kl", "k3_kl", "chi2_token", "chi2_seq"):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(0, abs=1e-12)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1


def test_huge_differences_stay_finite() -> None:
    trainer, engine = torch.tensor([[0.0, -1000.0]]), torch.tensor([[-1000.0, 0.0]])
    for level in ("token", "sequence"):
        options = _options(rollout_is=level, rollout_rs="token_k3")
        result = correct(trainer, engine, torch.ones(1, 2), options)
        assert result.weights.isfinite().all() and not result.mask.all()
        assert all(math.isfinite(value) for value in _metrics(result, options).values())


def test_a_missing_rollout_log_prob_is_an_error_and_never_zero() -> None:
    trainer, engine, mask = _logprobs()
    row, t = mask.nonzero()[0].tolist()
    for missing in (NAN, -float("inf")):
        engine[row, t] = missing
        with pytest.raises(ValueError, match=rf"1 of {int(mask.sum())} response tokens have no rollout log-prob"):
            correct(trainer, engine, mask, _options())
    with pytest.raises(ValueError, match="the engine returned no log-probs"):
        correct(trainer, None, mask, _options())


def test_no_token_gives_no_metrics() -> None:
    trainer, engine, mask = _logprobs()
    assert _metrics(correct(trainer, engine, torch.zeros_like(mask), _options()), _options()) == {}


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout_is is 'row', but it has to be one of none, token, sequence"):
        _options(rollout_is="row")
    with pytest.raises(ValueError, match="rollout_rs is 'token_k4'"):
        _options(rollout_rs="token_k4")
    with pytest.raises(ValueError, match=r"rollout_rs_threshold is 0\.5, but for token_k1 it is a ratio"):
        _options(rollout_rs="token_k1", rollout_rs_threshold=0.5)


def test_the_config_offers_exactly_these_levels_and_rules() -> None:
    choices = {key.name: key.rules.choices for key in config_keys(RunConfig)}
    assert choices["algorithm.rollout_correction.rollout_is"] == CORRECTION_LEVELS
    assert choices["algorithm.rollout_correction.rollout_rs"] == REJECTION_RULES
