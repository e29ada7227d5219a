"""Guards over a run: which rules its metrics break, and what is to be done about it. Pure: no torch, no files.

Every rank runs the same `Guards` on the same numbers, so that all decide alike without asking one another. A checkpoint
keeps their state, so that a resumed run decides as the unbroken one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from megarl.config.guard_rules import Rule
from megarl.config.schema_guard import GuardConfig

_AVERAGE_CONDITIONS = ("drop_below_average", "times_average")
"""Those that compare with the steps before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A rule that is broken, whether or not it fires."""

    rule: Rule
    value: float
    """What was compared: the metric, or its average over the window."""
    limit: float | None
    """What it was compared with; None for `not_finite`."""

    def description(self) -> str:
        """In words, e.g. `actor/ppo_kl is 0.3, above 0.1`."""
        rule, said = self.rule, f"{self.rule.metric} is {self.value:.4g}"
        if rule.condition in ("above", "below"):
            said += f" on average over {rule.window} steps" if rule.window > 1 else ""
            said += f", {rule.condition} {self.limit:.4g}"
        elif rule.condition == "drop_below_average":
            said += f", below {self.limit:.4g}, which is its average over {rule.window} steps less {rule.bound:g}"
        elif rule.condition == "times_average":
            said += f", above {self.limit:.4g}, which is {rule.bound:g} times its average over {rule.window} steps"
        return f"{said}, in {rule.patience} steps in a row" if rule.patience > 1 else said


@dataclass(frozen=True, kw_only=True, slots=True)
class Fired:
    """A rule that fired."""

    step: int
    broken: Broken
    first_step: int
    """The first of the steps that the decision is made of."""

    @property
    def rule(self) -> Rule:
        return self.broken.rule


@dataclass(kw_only=True, slots=True)
class _History:
    """What one rule remembers."""

    values: list[float] = field(default_factory=list)
    """The metric in the latest steps, at most as many as the window."""
    in_a_row: int = 0
    """Steps that broke the bound, since the last that did not or since the rule fired."""
    has_warned: bool = False
    """Whether it has warned since the metric was within its bound: it does so once."""


class Guards:
    """The rules of a run, what they remember, and what has been done so far."""

    def __init__(self, rules: Sequence[Rule], settings: GuardConfig) -> None:
        self.rules = list(rules)
        self._settings = settings
        self._histories = {rule.id: _History() for rule in self.rules}
        self._doubted: list[tuple[int, int]] = []
        self.lr_factor = 1.0
        """What the learning rates of the config are multiplied by."""
        self.rollbacks = 0
        self.skips_step = False
        """Whether all updates of the step that comes are left out."""
        self.idle_steps = 0
        """Steps in a row all of whose updates were left out."""
        self.counts: dict[str, int] = {}
        """How often each guard has fired, by name."""
        self.recorded = 0
        """Lines that guards.jsonl has."""

    @property
    def metrics(self) -> list[str]:
        """What is watched, each once."""
        return list(dict.fromkeys(rule.metric for rule in self.rules))

    def look(self, step: int, values: Mapping[str, float], decided: Iterable[str] = ()) -> list[Fired]:
        """Takes in the metrics after a step; returns the rules that fire.

        Args:
            values: metrics by name. A rule whose metric is not there looks away.
            decided: metrics about which rules of `skip_step` have been asked before the update (`broken`); these
                remember the values and do not fire.
        """
        already = set(decided)
        found = [
            self._look(rule, step, values[rule.metric], fires=rule.action != "skip_step" or rule.metric not in already)
            for rule in self.rules
            if rule.metric in values
        ]
        fired = [each for each in found if each is not None]
        for each in fired:
            if each.rule.action != "warn":
                # A step's metrics are about the weights that it begins with, which are those of the checkpoint before.
                self._doubted.append((each.first_step - 1, step))
        return fired

    def broken(self, values: Mapping[str, float]) -> list[Broken]:
        """Rules of `skip_step` that these numbers break, which are known before an update; nothing is remembered."""
        found = [
            self._judge(rule, values[rule.metric])
            for rule in self.rules
            if rule.action == "skip_step" and rule.metric in values
        ]
        return [each for each in found if each is not None]

    def lower_lr(self, factor: float) -> bool:
        """Multiplies the learning rates by `factor`, as far as `guard.min_lr_factor` allows; whether that did it."""
        before = self.lr_factor
        self.lr_factor = min(before, max(before * factor, self._settings.min_lr_factor))
        return self.lr_factor < before

    def is_good(self, checkpoint: int) -> bool:
        """Whether no guard that acts has fired about weights of this checkpoint or of one before it."""
        return not any(first <= checkpoint <= last for first, last in self._doubted)

    def goes_back(self, before: dict[str, Any]) -> None:
        """After a rollback, when the checkpoint's state is in place: what the run has been through since is kept.

        Args:
            before: `state_dict` of before the rollback.
        """
        self.lr_factor, self.rollbacks = before["lr_factor"], before["rollbacks"]
        self.counts, self.recorded = before["counts"], before["recorded"]

    def forget(self) -> None:
        """Drops all histories: a checkpoint that brings none is about to be loaded."""
        self._histories = {rule.id: _History() for rule in self.rules}
        self._doubted, self.skips_step, self.idle_steps = [], False, 0

    def state_dict(self) -> dict[str, Any]:
        """JSON; NaN cannot be among it."""
        return {
            "histories": {name: asdict(history) for name, history in self._histories.items()},
            "doubted": [list(span) for span in self._doubted],
            "lr_factor": self.lr_factor,
            "rollbacks": self.rollbacks,
            "skips_step": self.skips_step,
            "idle_steps": self.idle_steps,
            "counts": dict(self.counts),
            "recorded": self.recorded,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Rules that were added or changed since begin anew."""
        self.forget()
        for name in self._histories:
            if name in state["histories"]:
                self._histories[name] = _History(**state["histories"][name])
        self._doubted = [(first, last) for first, last in state["doubted"]]
        self.skips_step, self.idle_steps = state["skips_step"], state["idle_steps"]
        self.goes_back(state)

    def _look(self, rule: Rule, step: int, value: float, *, fires: bool) -> Fired | None:
        broken, history = self._judge(rule, value), self._histories[rule.id]
        self._remember(rule, value, broken)
        if broken is None:
            history.in_a_row, history.has_warned = 0, False
            return None
        history.in_a_row += 1
        if not fires or history.in_a_row < rule.patience or (rule.action == "warn" and history.has_warned):
            return None
        history.in_a_row, history.has_warned = 0, True
        if rule.action == "lower_lr":
            history.values.clear()  # what the lower rate does has to be seen before it is lowered again
        return Fired(step=step, broken=broken, first_step=max(step - rule.steps_looked_at + 1, 1))

    def _judge(self, rule: Rule, value: float) -> Broken | None:
        if rule.condition == "not_finite":
            return None if math.isfinite(value) else Broken(rule=rule, value=value, limit=None)
        if not math.isfinite(value):
            return None  # for which there is not_finite
        before, limit = self._histories[rule.id].values, rule.bound
        if rule.condition in _AVERAGE_CONDITIONS:
            if len(before) < rule.window:
                return None
            average = fmean(before)
            limit = average - rule.bound if rule.condition == "drop_below_average" else average * rule.bound
            if rule.condition == "times_average" and average <= 0:
                return None  # so many times nothing, or less, is no bound
        else:
            latest = [*before[len(before) - rule.window + 1 :], value] if rule.window > 1 else [value]
            if len(latest) < rule.window:
                return None
            value = fmean(latest)
        is_broken = value < limit if rule.condition in ("below", "drop_below_average") else value > limit
        return Broken(rule=rule, value=value, limit=limit) if is_broken else None

    def _remember(self, rule: Rule, value: float, broken: Broken | None) -> None:
        if not math.isfinite(value) or rule.condition == "not_finite":
            return
        if broken is not None and broken.limit is not None and rule.condition in _AVERAGE_CONDITIONS:
            # One spike must not lift the average that the next is compared with; a new level still gets through.
            value = broken.limit
        history = self._histories[rule.id]
        history.values = [*history.values, value][-rule.window :]
