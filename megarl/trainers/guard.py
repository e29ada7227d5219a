"""Guards at work: after each step they look at its metrics, and do what their rules say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config import ConfigError, RunConfig
from megarl.config.guard_notes import guard_notes
from megarl.config.metric_names import known_metrics
from megarl.config.schema_guard import ACTIONS
from megarl.config.validate_guard import nearest
from megarl.data.sampler import PromptSampler
from megarl.models.train import LearningRateSchedule
from megarl.observe.guard_log import LOG_NAME, GuardLog
from megarl.observe.guards import Broken, Fired, Guards
from megarl.trainers.update_watch import UpdateWatch

_ABSENT, _PRESENT, _MISSING = 0.0, 1.0, 2.0
"""Whether a step has a metric; missing is one that others of its family are there without."""


class Restorable(Protocol):
    """What a rollback needs of a run's checkpoints."""

    @property
    def steps(self) -> Collection[int]:
        """Whose checkpoints there are; one that is being written is not among them."""
        ...

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one. Collective over the world."""
        ...

    def roll_back_to(self, step: int) -> None:
        """Restores the checkpoint of `step` and moves later ones out of the way. Collective over the world."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a loop has to know when the guards have looked."""

    step: int
    """The step that the run stands at: an earlier one after a rollback."""
    metrics: dict[str, float]
    """`guard/…`, named in docs/metrics.md."""
    may_save: bool
    """False where the run went back or ends: what it would save is not worth keeping."""
    problem: str | None
    """Why the run ends, for `ActingGuards.check`."""


class ActingGuards:
    """The guards of a loop on one rank. Its methods are collective, and decide alike on every rank."""

    def __init__(
        self,
        guards: Guards,
        watch: UpdateWatch,
        config: RunConfig,
        *,
        schedules: Iterable[LearningRateSchedule],
        sampler: PromptSampler,
        checkpoints: Restorable,
        after_rollback: Callable[[], Any],
        tell: Callable[[str], None],
        start: int,
        total_steps: int,
    ) -> None:
        """Args:
        watch: of the same guards.
        schedules: of every model that learns.
        after_rollback: what has to follow the weights, such as a sync to the engine.
        tell: prints a line for people, once.
        start: the step that the run goes on after.
        total_steps: of the whole run.
        """
        self._guards = guards
        self._watch = watch
        self._settings = config.guard
        self._schedules = list(schedules)
        self._sampler = sampler
        self._checkpoints = checkpoints
        self._after_rollback = after_rollback
        self._tell = tell
        self._log = GuardLog(
            config.trainer.default_local_dir, dist.get_rank() == 0, tell, lines=guards.recorded if start else None
        )
        # Those that validation knows of may come later, as the actor's do when the critic warms up.
        self._unseen = {rule.metric for rule in config.guard.rules} - known_metrics(config).names
        self._set_learning_rates()
        for note in guard_notes(config, total_steps):
            tell(note)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Verdict:
        """Looks at the metrics of a step, and acts.

        Args:
            metrics: all of them, those of an evaluation too. Where ranks differ, rank 0's count.

        Raises:
            ConfigError: on every rank; one of `guard.rules` is about a metric that does not exist.
        """
        guards, watch = self._guards, self._watch
        values = self._from_first_rank(metrics)
        fired = guards.look(step, values, decided=watch.asked)
        fired.sort(key=lambda each: ACTIONS.index(each.rule.action))
        left_out = self._left_out_by_rule()
        for broken, count in left_out:
            self._record(step, broken, self._left_out(count))
        lowers = self._lower_lr(fired)
        ends = next((each for each in fired if each.rule.action == "stop"), None)
        back = next((each for each in fired if each.rule.action == "rollback"), None) if ends is None else None
        target, problem = (None, None) if back is None else self._roll_back(step, back)
        for each in fired:
            self._record(step, each.broken, self._done(each, lowers, ends, target))
        if ends is not None:
            problem = f"{ends.rule.key} ends the run at step {step}: {_sentence(ends.broken)}"
        return Verdict(
            step=step if target is None else target,
            metrics={
                "guard/fired": float(len(fired) + len(left_out)),
                "guard/skipped_updates": float(watch.skipped),
                "guard/lr_factor": guards.lr_factor,
                "guard/rollbacks": float(guards.rollbacks),
            },
            may_save=target is None and problem is None,
            problem=problem or self._idle_problem(step),
        )

    def check(self, verdict: Verdict) -> None:
        """To be called when the step's metrics are written.

        Raises:
            ConfigError: on every rank; a guard ends the run.
        """
        if verdict.problem is not None:
            self._checkpoints.finish()  # the process would take the one that is being written along
            raise ConfigError(verdict.problem)

    def protected(self, step: int) -> list[int]:
        """Steps whose checkpoints a rollback may still need: the newest that nothing from `step` on can put in doubt.

        The others that it may need are newer.
        """
        reach = [rule.steps_looked_at for rule in self._guards.rules if rule.action == "rollback"]
        if not reach:
            return []
        self._checkpoints.finish()
        older = [each for each in self._checkpoints.steps if each <= step - max(reach)]
        return [max(older)] if older else []

    def summary(self) -> str | None:
        """What the guards of the whole run did, in a line; None where none fired."""
        if not self._guards.counts:
            return None
        counts = ", ".join(f"{name} {count}×" for name, count in self._guards.counts.items())
        return f"guards fired: {counts}; {LOG_NAME} says when and why"

    def _from_first_rank(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics that are watched. Some, such as times, are another number on each rank."""
        names = self._guards.metrics
        families = {name.partition("/")[0] for name in metrics}
        state = [
            _PRESENT if name in metrics else _MISSING if name.partition("/")[0] in families else _ABSENT
            for name in names
        ]
        numbers = [[float(metrics.get(name, 0.0)) for name in names], state]
        shared = torch.tensor(numbers, dtype=torch.float64, device=platform.current().device)
        dist.broadcast(shared, 0)
        found, missing = {}, set()
        for name, value, is_there in zip(names, *shared.tolist(), strict=True):
            if is_there == _PRESENT:
                found[name] = value
            elif is_there == _MISSING:
                missing.add(name)
        self._unseen -= set(found)
        self._refuse_unknown(missing & self._unseen, metrics)
        return found

    def _refuse_unknown(self, missing: Collection[str], metrics: Mapping[str, float]) -> None:
        for rule in self._guards.rules:
            if rule.metric in missing and rule.key.startswith("guard.rules"):
                raise ConfigError(
                    f"{rule.key}.metric is {rule.metric!r}, which the steps of this run do not have"
                    f"{nearest(rule.metric, list(metrics))}."
                )

    def _lower_lr(self, fired: Sequence[Fired]) -> bool:
        """Lowers the rates once, however many rules want it; whether that was possible."""
        if not any(each.rule.action == "lower_lr" for each in fired):
            return False
        lowered = self._guards.lower_lr(self._settings.lr_factor)
        self._set_learning_rates()
        return lowered

    def _set_learning_rates(self) -> None:
        for schedule in self._schedules:
            schedule.factor = self._guards.lr_factor

    def _roll_back(self, step: int, fired: Fired) -> tuple[int | None, str | None]:
        """Goes back to the newest good checkpoint; returns its step, or why the run has to end instead."""
        guards, settings = self._guards, self._settings
        why = f"{fired.rule.key} would take the run back at step {step} ({_sentence(fired.broken).rstrip('.')}), but "
        if guards.rollbacks >= settings.max_rollbacks:
            return None, f"{why}guard.max_rollbacks {settings.max_rollbacks} have been made, so it ends."
        # Where the run goes back to must not depend on how fast the disk is.
        self._checkpoints.finish()
        good = [each for each in self._checkpoints.steps if guards.is_good(each)]
        if not good:
            return None, (
                f"{why}there is no good checkpoint of before step {fired.first_step}, so it ends: lower "
                "trainer.save_freq, or keep more checkpoints."
            )
        target, before = max(good), guards.state_dict()
        guards.forget()
        self._checkpoints.roll_back_to(target)
        guards.goes_back(before)
        guards.rollbacks += 1
        guards.lower_lr(settings.rollback_lr_factor)
        self._set_learning_rates()
        self._sampler.reorder(guards.rollbacks)
        self._after_rollback()
        return target, None

    def _left_out_by_rule(self) -> list[tuple[Broken, int]]:
        """Of each rule that left updates of this step out the first time, and how many times it did."""
        counts = Counter(broken.rule for broken in self._watch.broken)
        first = {broken.rule: broken for broken in reversed(self._watch.broken)}
        return [(first[rule], count) for rule, count in counts.items()]

    def _left_out(self, count: int) -> str:
        if self._watch.skipped == self._watch.updates:
            return f"all {self._watch.updates} updates of the step left out"
        return f"{count} of {self._watch.updates} updates left out"

    def _done(self, fired: Fired, lowers: bool, ends: Fired | None, target: int | None) -> str:
        """What came of a rule that fired, in words."""
        match fired.rule.action:
            case "skip_step":
                self._guards.skips_step = True
                return "the updates of the next step will be left out"
            case "lower_lr" if lowers:
                return f"learning rates are now {self._guards.lr_factor:g} times the configured ones"
            case "lower_lr":
                return f"learning rates are already at guard.min_lr_factor {self._settings.min_lr_factor:g}"
            case "rollback" if target is not None:
                lower = f", with {self._guards.lr_factor:g} times the configured learning rates"
                return (
                    f"back to the checkpoint of step {target}, rollback {self._guards.rollbacks} of "
                    f"{self._settings.max_rollbacks}, with another order of the data"
                    f"{lower if self._guards.lr_factor < 1 else ''}"
                )
            case "rollback" | "stop":
                return "the run ends"
        return "nothing: a warning"

    def _record(self, step: int, broken: Broken, done: str) -> None:
        rule = broken.rule
        self._guards.counts[rule.name] = self._guards.counts.get(rule.name, 0) + 1
        self._guards.recorded += 1
        self._log.write(
            {
                "step": step,
                "guard": rule.key,
                "metric": rule.metric,
                "value": broken.value,
                "condition": rule.condition,
                "threshold": broken.limit,
                "action": rule.action,
                "done": done,
            }
        )
        said = f"{_sentence(broken).rstrip('.')}" if rule.action == "warn" else f"{broken.description()}: {done}"
        self._tell(f"guard {rule.name}: step {step}: {said}")

    def _idle_problem(self, step: int) -> str | None:
        """Why the run ends where guards have left out every update for too long."""
        watch, guards, limit = self._watch, self._guards, self._settings.max_skipped_steps
        guards.idle_steps = guards.idle_steps + 1 if watch.updates and watch.skipped == watch.updates else 0
        if guards.idle_steps < limit:
            return None
        return (
            f"guards have left out every update of {limit} steps in a row, the last is step {step}, so the run learns "
            f"nothing any more: see {LOG_NAME}, and loosen the guard or raise guard.max_skipped_steps."
        )


def _sentence(broken: Broken) -> str:
    advice = broken.rule.advice
    return f"{broken.description()}{f'; {advice}' if advice else ''}."
