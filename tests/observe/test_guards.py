"""Guards fire on the steps that a person would name, and remember across a checkpoint what they have seen."""

from __future__ import annotations

import json
import math
from statistics import fmean

import pytest

from megarl.config.guard_rules import Rule
from megarl.config.schema_guard import GuardConfig
from megarl.observe.guards import Guards

NAN, INF = math.nan, math.inf


def rule(condition: str, bound: float = 0.0, *, metric: str = "loss", action: str = "stop", **settings: int) -> Rule:
    return Rule(
        name=metric,
        key=f"guard.{metric}",
        metric=metric,
        condition=condition,
        bound=bound,
        window=settings.get("window", 1),
        patience=settings.get("patience", 1),
        action=action,
    )


def steps_that_fire(rule: Rule, values: list[float]) -> list[int]:
    """Counted from 1."""
    guards = Guards([rule], GuardConfig())
    return [step for step, value in enumerate(values, 1) if guards.look(step, {rule.metric: value})]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        (rule("above", 1.0), [0.5, 1.0, 1.1, 0.9, 2.0], [3, 5]),
        (rule("below", 1.0), [1.5, 1.0, 0.9, 1.1], [3]),
        # The mean of two: 0.5, 1.5, 1.5, 0.5.
        (rule("above", 1.0, window=2), [0.0, 1.0, 2.0, 1.0, 0.0], [3, 4]),
        (rule("above", 1.0, window=3), [9.0, 9.0], []),
        (rule("above", 1.0, patience=2), [2.0, 0.0, 2.0, 2.0, 2.0, 2.0], [4, 6]),
        # The average of the two before is 1, 1.5, 1.5; the drop at the end is to 0.5 below it.
        (rule("drop_below_average", 0.4, window=2), [1.0, 1.0, 2.0, 1.2, 1.1], [5]),
        (rule("times_average", 3.0, window=2), [1.0, 1.0, 3.0, 5.9, 20.0], [5]),
        (rule("times_average", 3.0, window=2), [0.0, 0.0, 5.0], []),
        (rule("not_finite"), [1.0, NAN, 1.0, INF, -INF], [2, 4, 5]),
        # What is no number is judged by not_finite alone, and spoils no average.
        (rule("above", 1.0), [NAN, INF, 2.0], [3]),
        (rule("drop_below_average", 0.4, window=2), [1.0, NAN, 1.0, 0.5], [4]),
    ],
)
def test_a_rule_fires_on_these_steps(rule: Rule, values: list[float], expected: list[int]) -> None:
    assert steps_that_fire(rule, values) == expected


def test_a_warning_comes_once_until_the_metric_has_recovered() -> None:
    values = [2.0, 2.0, 2.0, 0.0, 2.0, 2.0]
    assert steps_that_fire(rule("above", 1.0, action="warn"), values) == [1, 5]
    assert steps_that_fire(rule("above", 1.0, action="warn", patience=2), values) == [2, 6]


def test_a_spike_does_not_hide_the_next_one_but_a_new_level_becomes_the_usual_one() -> None:
    spikes = rule("times_average", 3.0, window=4)
    assert steps_that_fire(spikes, [1.0] * 4 + [1000.0, 1.0, 1000.0]) == [5, 7]
    fired = steps_that_fire(spikes, [1.0] * 4 + [10.0] * 20)
    assert fired[0] == 5 and fired[-1] < 10


def test_a_moving_average_is_the_mean_of_the_last_window_values() -> None:
    """Against a plain loop over a sequence that breaks no bound, so that nothing is cut."""
    values = [math.sin(step) + 2 for step in range(40)]
    guards = Guards([rule("drop_below_average", 100.0, window=7)], GuardConfig())
    for step, value in enumerate(values, 1):
        guards.look(step, {"loss": value})
    (history,) = guards.state_dict()["histories"].values()
    assert fmean(history["values"]) == pytest.approx(fmean(values[-7:]), abs=1e-12)


def test_a_lower_rate_is_given_time_before_it_is_lowered_again() -> None:
    """It needs its window anew: with one, a run would come down to nothing within a few steps."""
    values = [2.0] * 10
    assert steps_that_fire(rule("above", 1.0, action="lower_lr", window=4), values) == [4, 8]
    guards = Guards([], GuardConfig(min_lr_factor=0.3))
    assert [guards.lower_lr(0.5) for _ in range(3)] == [True, True, False]
    assert guards.lr_factor == 0.3


def test_a_metric_that_a_step_does_not_have_is_not_judged() -> None:
    guards = Guards([rule("above", 1.0, patience=2)], GuardConfig())
    fired = [guards.look(step, values) for step, values in enumerate([{"loss": 2.0}, {}, {"loss": 2.0}], 1)]
    assert [len(each) for each in fired] == [0, 0, 1]


def test_the_checkpoints_of_doubted_steps_are_not_good() -> None:
    """Of an average over three steps that was bad twice in a row four steps, and the weights that these began with."""
    guards = Guards([rule("above", 1.0, window=3, patience=2, action="rollback")], GuardConfig())
    fired = [each for step in range(1, 9) for each in guards.look(step, {"loss": 0.0 if step < 4 else 2.0})]
    assert [(each.step, each.first_step) for each in fired[:1]] == [(6, 3)]
    assert [step for step in range(1, 7) if not guards.is_good(step)] == [2, 3, 4, 5, 6]


def test_a_warning_puts_no_checkpoint_in_doubt() -> None:
    guards = Guards([rule("above", 1.0, action="warn")], GuardConfig())
    assert guards.look(3, {"loss": 2.0}) and guards.is_good(3)


def test_an_update_is_judged_by_the_steps_before_it_and_leaves_no_trace() -> None:
    guards = Guards([rule("times_average", 3.0, window=2, action="skip_step")], GuardConfig())
    assert guards.broken({"loss": 50.0}) == []  # there is no average yet
    for step in (1, 2):
        assert guards.look(step, {"loss": 1.0}) == []
    before = guards.state_dict()
    assert [each.limit for each in guards.broken({"loss": 50.0, "other": 1.0})] == [3.0]
    assert guards.broken({"loss": 2.9}) == [] and guards.state_dict() == before
    # About it the guards were asked already; about what was known only later they are asked now.
    assert guards.look(3, {"loss": 50.0}, decided=["loss"]) == []
    assert [each.step for each in guards.look(4, {"loss": 50.0})] == [4]


RULES = [
    rule("above", 1.0, window=3),
    rule("below", 1.0, patience=2, action="warn"),
    rule("drop_below_average", 0.5, window=4, action="rollback"),
    rule("times_average", 2.0, window=3, action="lower_lr"),
    rule("not_finite", metric="norm", patience=2, action="warn"),
]


def run(guards: Guards, start: int, stop: int) -> list[tuple]:
    fired = []
    for step in range(start, stop):
        values = {"loss": (step * 7919 % 13) / 6, "norm": NAN if step % 5 < 3 else 1.0}
        fired += [(each.step, each.rule.id, each.broken.value, each.broken.limit) for each in guards.look(step, values)]
    return fired


@pytest.mark.parametrize("interrupted", [1, 2, 5, 8, 13])
def test_guards_that_were_interrupted_fire_as_the_unbroken_ones(interrupted: int) -> None:
    whole, first, second = (Guards(RULES, GuardConfig()) for _ in range(3))
    expected = run(whole, 1, 30)
    before = run(first, 1, interrupted)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    after = run(second, interrupted, 30)
    assert len({fired[1] for fired in expected}) == len(RULES)  # each of the rules has fired
    assert repr(before + after) == repr(expected)  # NaN is not equal to itself
    assert second.state_dict() == whole.state_dict()


def test_a_rule_that_was_changed_begins_anew_and_the_others_go_on() -> None:
    first = Guards([rule("above", 1.0, window=3), rule("below", 0.0, window=3)], GuardConfig())
    for step in (1, 2):
        first.look(step, {"loss": 5.0})
    second = Guards([rule("above", 2.0, window=3), rule("below", 0.0, window=3)], GuardConfig())
    second.load_state_dict(first.state_dict())
    assert [len(each["values"]) for each in second.state_dict()["histories"].values()] == [0, 2]


def test_a_rollback_forgets_the_steps_and_keeps_what_was_done() -> None:
    guards = Guards([rule("above", 1.0, window=2, action="rollback")], GuardConfig())
    guards.look(1, {"loss": 0.5})
    saved = guards.state_dict()
    for step in (2, 3):
        guards.look(step, {"loss": 9.0})
    guards.rollbacks, guards.recorded, guards.counts = 1, 4, {"loss": 4}
    assert guards.lower_lr(0.5)
    before = guards.state_dict()
    guards.forget()
    guards.load_state_dict(saved)
    guards.goes_back(before)
    kept = ("rollbacks", "lr_factor", "recorded", "counts")
    assert {name: guards.state_dict()[name] for name in kept} == {name: before[name] for name in kept}
    assert guards.state_dict()["histories"] == saved["histories"] and guards.is_good(3)


@pytest.mark.parametrize("condition", ["above", "below", "drop_below_average", "times_average", "not_finite"])
def test_what_is_broken_is_said_in_words_with_numbers(condition: str) -> None:
    found = rule(condition, 1.5, window=2, action="skip_step") if condition != "not_finite" else rule(condition)
    guards = Guards([found], GuardConfig())
    value = {"below": -50.0, "drop_below_average": -50.0, "not_finite": NAN}.get(condition, 50.0)
    for step in (1, 2):
        guards.look(step, {"loss": 1.0})
    (last,) = guards.look(3, {"loss": value})
    text = last.broken.description()
    assert text.startswith("loss is ") and "\n" not in text
    if condition != "not_finite":
        assert "1.5" in text and "2 steps" in text
