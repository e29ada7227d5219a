"""A run ends when its validation loss has not got better for a while, and says which step was the best."""

from __future__ import annotations

import math

import pytest

from megarl.config.schema import TrainerConfig
from megarl.trainers.early_stopping import EarlyStopping


def after(losses: list[float], *, patience: int = 2, min_delta: float = 0.0) -> EarlyStopping:
    stopping = EarlyStopping(patience=patience, min_delta=min_delta)
    for step, loss in enumerate(losses):
        assert not stopping.is_over
        stopping.update(step, loss)
    return stopping


@pytest.mark.parametrize(
    ("losses", "is_over", "best"),
    [
        ([3.0], False, (0, 3.0)),
        ([3.0, 2.0, 2.5], False, (1, 2.0)),
        ([3.0, 2.0, 2.5, 2.0], True, (1, 2.0)),
        ([3.0, 3.1, 2.9, 3.0], False, (2, 2.9)),
        ([3.0, math.nan, math.nan], True, (0, 3.0)),
        ([math.nan, math.nan], True, (None, None)),
    ],
)
def test_evaluations_are_counted_since_the_best(losses: list[float], is_over: bool, best: tuple) -> None:
    stopping = after(losses)
    assert stopping.is_over == is_over
    assert (stopping.best_step, stopping.best_loss) == best


def test_an_improvement_that_is_too_small_does_not_count() -> None:
    assert after([3.0, 2.95, 2.92], min_delta=0.1).is_over
    small_steps = after([3.0, 2.95, 2.89], min_delta=0.1)
    assert not small_steps.is_over and small_steps.best_step == 2


def test_the_best_step_is_named() -> None:
    assert "2, of step 1" in after([3.0, 2.0, 2.5]).description()
    stopped = after([3.0, 2.0, 2.5, 2.5], min_delta=0.25).description()
    assert stopped.startswith("stopped early") and "2, of step 1" in stopped and "in the 2 since" in stopped
    assert "no evaluation gave a validation loss" in after([]).description()


def test_a_resumed_run_goes_on_counting() -> None:
    first = after([3.0, 2.0, 2.5])
    second = EarlyStopping(patience=2, min_delta=0.0)
    second.load_state_dict(first.state_dict())
    assert second == first
    second.update(3, 2.1)
    assert second.is_over


def test_a_config_without_patience_has_none() -> None:
    assert EarlyStopping.of(TrainerConfig()) is None
    made = EarlyStopping.of(TrainerConfig(early_stopping_patience=4, early_stopping_min_delta=0.5))
    assert (made.patience, made.min_delta) == (4, 0.5)
