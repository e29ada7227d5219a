"""The learning rate of every optimizer step, against the formulas of the schedules."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.config.schema_learning import OptimConfig
from megarl.models.train import learning_rate_schedule

STEPS, WARMUP, LR, MIN_LR = 20, 4, 1e-3, 1e-4

DECAYS = {
    "exponential": lambda x: 2 * 0.5**x - 1,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}
"""From 1 where the decay begins to 0 where it ends."""


class Optimizer:
    """What a scheduler sets."""

    def __init__(self) -> None:
        self.param_groups: list[dict] = [{}]


def rates(steps: int = STEPS, **settings: object) -> list[float]:
    optimizer = Optimizer()
    config = OptimConfig(lr=LR, min_lr=MIN_LR, lr_warmup_steps=WARMUP, **settings)
    schedule = learning_rate_schedule(optimizer, config, steps)
    found = []
    for _ in range(steps):
        schedule.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def expected(decay_start: int, coefficient) -> list[float]:
    rates = [LR * step / WARMUP for step in range(1, WARMUP + 1)]
    for step in range(WARMUP + 1, STEPS + 1):
        progress = max(step - decay_start, 0) / (STEPS - decay_start)
        rates.append(MIN_LR + coefficient(progress) * (LR - MIN_LR))
    return rates


def test_constant_stays_at_the_highest_rate() -> None:
    assert rates(lr_decay_style="constant") == pytest.approx(expected(WARMUP, lambda x: 1.0))


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_a_decay_begins_after_warm_up_and_ends_with_the_run(style: str) -> None:
    assert rates(lr_decay_style=style) == pytest.approx(expected(WARMUP, DECAYS[style]))


@pytest.mark.parametrize("style", DECAYS)
def test_wsd_is_constant_up_to_its_last_steps(style: str) -> None:
    found = rates(lr_decay_style="wsd", lr_wsd_decay_style=style, lr_wsd_decay_steps=5)
    assert found == pytest.approx(expected(STEPS - 5, DECAYS[style]))
    assert found[14] == LR and found[-1] == pytest.approx(MIN_LR)


def test_wsd_decays_in_the_last_tenth_of_the_run_if_no_steps_are_given() -> None:
    assert rates(lr_decay_style="wsd") == pytest.approx(expected(STEPS - 2, DECAYS["exponential"]))


def test_a_wsd_decay_longer_than_the_run_begins_after_warm_up() -> None:
    found = rates(lr_decay_style="wsd", lr_wsd_decay_style="linear", lr_wsd_decay_steps=50)
    assert found == pytest.approx(expected(WARMUP, DECAYS["linear"]))


def test_the_same_rates_go_on_after_a_resumption() -> None:
    config = OptimConfig(lr=LR, lr_decay_style="wsd", lr_wsd_decay_steps=5)
    first = learning_rate_schedule(Optimizer(), config, STEPS)
    first.step(17)
    optimizer = Optimizer()
    second = learning_rate_schedule(optimizer, config, STEPS)
    second.load_state_dict(first.state_dict())
    assert torch.isclose(torch.tensor(optimizer.param_groups[0]["lr"]), torch.tensor(LR * (2 * 0.5 ** (2 / 5) - 1)))


def test_a_run_that_goes_back_has_the_rates_of_where_it_goes_back_to() -> None:
    optimizer = Optimizer()
    schedule = learning_rate_schedule(optimizer, OptimConfig(lr=LR, lr_decay_style="linear"), STEPS)
    schedule.step(4)
    state = schedule.state_dict()
    schedule.step(3)
    schedule.load_state_dict(state)
    schedule.step(1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * (1 - 5 / STEPS))


@pytest.mark.parametrize(("before", "now"), [(4, 1), (2, 3), (1, 5)])
def test_with_mini_batches_of_another_size_the_rates_are_still_those_of_the_runs_step(before: int, now: int) -> None:
    """STEPS steps of the run, of which 6 are made with `before` updates each and the seventh with `now`."""
    config = OptimConfig(lr=LR, lr_decay_style="linear")
    first = learning_rate_schedule(Optimizer(), config, STEPS * before, updates_per_step=before)
    first.step(6 * before)
    optimizer = Optimizer()
    second = learning_rate_schedule(optimizer, config, STEPS * now, updates_per_step=now)
    second.load_state_dict(first.state_dict())
    second.step(now)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * (1 - 7 / STEPS))
