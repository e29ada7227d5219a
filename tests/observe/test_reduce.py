"""Metrics of two ranks, compared with numpy on everything that both recorded."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.observe import MetricSums
from megarl.observe.reduce import Kind
from tests.spawn import run_ranks

KINDS: dict[str, Kind] = {
    "tokens/mean": "mean",
    "tokens/max": "max",
    "tokens/min": "min",
    "reward/failures/timeout": "sum",
    "actor/entropy": "mean",
    "only rank 1/min": "min",
    "poisoned/max": "max",
    "poisoned/mean": "mean",
    "never/mean": "mean",
    "never/max": "max",
    "never/sum": "sum",
}


def _micro_batches(rank: int) -> list[torch.Tensor]:
    """Values of different counts, one micro-batch empty."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) * 10 for size in ((3, 7), (1, 2), (0, 5))[: 3 - rank]]


def _reduce_twice() -> list[dict[str, float]]:
    rank = dist.get_rank()
    # The ranks declare the same metrics in another order.
    sums = MetricSums(dict(sorted(KINDS.items(), reverse=rank == 1)), "cpu")
    for values in _micro_batches(rank):
        for name in ("tokens/mean", "tokens/max", "tokens/min"):
            sums.add_values(name, values)
        sums.add("reward/failures/timeout", rank + 1)
    if rank == 1:  # rank 0 is an early pipeline stage: no log-probs there
        sums.add("actor/entropy", torch.tensor(6.0), count=4)
        sums.add("actor/entropy", torch.tensor([3.0], requires_grad=True), count=torch.tensor(2))
        sums.add("only rank 1/min", -2.5)
        sums.add_values("poisoned/max", torch.tensor([1.0, math.nan]))
        sums.add("poisoned/mean", math.nan)
    else:
        sums.add("poisoned/max", 5.0)
        sums.add("poisoned/mean", 5.0)
    return [sums.reduce(dist.group.WORLD), sums.reduce(dist.group.WORLD)]


def test_two_ranks_agree_with_numpy_on_all_values() -> None:
    (first, first_again), (second, second_again) = run_ranks(_reduce_twice, 2)
    assert repr(first) == repr(second), "every rank has the same numbers"
    values = np.concatenate([batch.double().numpy().ravel() for rank in (0, 1) for batch in _micro_batches(rank)])
    expected = {
        "tokens/mean": values.mean(),
        "tokens/max": values.max(),
        "tokens/min": values.min(),
        "reward/failures/timeout": 3 * 1 + 2 * 2,
        "actor/entropy": (6 + 3) / (4 + 2),
        "only rank 1/min": -2.5,
        "poisoned/max": math.nan,
        "poisoned/mean": math.nan,
        "never/sum": 0.0,
    }
    assert first.keys() == expected.keys(), "a mean or max of nothing is left out"
    for name, value in expected.items():
        np.testing.assert_allclose(first[name], value, rtol=1e-12, err_msg=name)
    assert first_again == second_again == {"reward/failures/timeout": 0.0, "never/sum": 0.0}, "it started again"


def test_a_mean_of_many_small_values_loses_no_digits() -> None:
    sums = MetricSums({"kl": "mean"}, "cpu")
    sums.add("kl", 1e8)
    for _ in range(1000):
        sums.add("kl", 1e-3)
    assert sums.reduce(None)["kl"] == pytest.approx((1e8 + 1) / 1001, rel=1e-12)


def test_extremes_may_be_negative_or_infinite() -> None:
    sums = MetricSums({"max": "max", "min": "min"}, "cpu")
    for value in (-3.0, -7.0):
        sums.add("max", value)
    sums.add_values("min", torch.tensor([4.0, -math.inf]))
    assert sums.reduce(None) == {"max": -3.0, "min": -math.inf}


def test_a_metric_that_was_not_declared_is_refused() -> None:
    sums = MetricSums({"actor/entropy": "mean"}, "cpu")
    with pytest.raises(ValueError, match=r"'actor/entropie' was not declared; declared are actor/entropy"):
        sums.add("actor/entropie", 1.0)
    with pytest.raises(ValueError, match="was not declared"):
        sums.add_values("actor/entropie", torch.ones(2))


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'x' has kind 'median'; kinds are mean, sum, max, min"):
        MetricSums({"x": "median"}, "cpu")  # type: ignore[dict-item]
