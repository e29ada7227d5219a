"""Rules of the `guard` section. Imports no torch."""

from collections.abc import Iterator
from difflib import get_close_matches

from megarl.config.guard_rules import NAMED_GUARDS, given_conditions, guard_metrics, is_set
from megarl.config.metric_names import KnownMetrics, is_of_evaluation, known_metrics, possible_values
from megarl.config.schema import RunConfig
from megarl.config.schema_guard import CONDITIONS, GuardSettings

_NAMES = (*NAMED_GUARDS, "nan")
_GUARDS_OWN = "guard/"
"""What the metrics begin with that say what guards did."""


def guard_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the guards of a run of any kind."""
    known = known_metrics(config)
    yield from _named_problems(config, known)
    for number, rule in enumerate(config.guard.rules):
        key, conditions = f"guard.rules[{number}]", given_conditions(rule)
        yield from _rule_problems(key, rule.metric, conditions, known)
        if rule.action == "none":
            continue
        if len(conditions) == 1:
            yield from _bound_problems(key, rule.metric, conditions[0], getattr(rule, conditions[0]))
        if is_of_evaluation(rule.metric) and config.trainer.test_freq <= 0:
            yield (
                f"{key}.metric is {rule.metric!r}, which evaluations have, but trainer.test_freq is "
                f"{config.trainer.test_freq}: set it, or name a metric of training."
            )
    for key, settings in _settings(config).items():
        yield from _action_problems(config, key, settings)


def nearest(metric: str, names: frozenset[str] | list[str]) -> str:
    """The end of a sentence about a metric that is not there: what may have been meant."""
    close = get_close_matches(metric, sorted(names), n=3)
    return f"; similar ones are {', '.join(close)}" if close else "; docs/metrics.md has them all"


def _settings(config: RunConfig) -> dict[str, GuardSettings]:
    named = {f"guard.{name}": getattr(config.guard, name) for name in _NAMES}
    return {**named, **{f"guard.rules[{number}]": rule for number, rule in enumerate(config.guard.rules)}}


def _named_problems(config: RunConfig, known: KnownMetrics) -> Iterator[str]:
    """Guards that a person has set although the run has nothing for them to watch."""
    for name in _NAMES:
        settings, metrics = getattr(config.guard, name), guard_metrics(name)
        if not is_set(config, f"guard.{name}") or settings.action == "none":
            continue
        if all(map(known.rules_out, metrics)):
            yield (
                f"guard.{name} is set, but this run ({_what(config)}) has no {' and no '.join(metrics)}: leave it out."
            )
        elif name in NAMED_GUARDS and len(metrics) == 1:
            condition = NAMED_GUARDS[name].condition
            yield from _bound_problems(f"guard.{name}", metrics[0], condition, getattr(settings, condition))
    if config.guard.nan.action == "skip_step":
        yield "guard.nan.action skip_step is what happens in any case: choose warn, lower_lr, rollback, stop or none."


def _what(config: RunConfig) -> str:
    algorithm = f" with {config.algorithm.adv_estimator}" if config.trainer.kind == "rl" else ""
    return f"{config.trainer.kind}{algorithm}"


def _rule_problems(key: str, metric: str, conditions: list[str], known: KnownMetrics) -> Iterator[str]:
    if not metric:
        yield f"{key} has no metric: name one of docs/metrics.md, e.g. {{metric: actor/entropy, below: 0.1}}."
        return
    if len(conditions) != 1:
        found = f"has {' and '.join(conditions)}" if conditions else "says nothing about when it fires"
        yield f"{key} over {metric} {found}: give it exactly one of {', '.join(CONDITIONS)}."
    if metric.startswith(_GUARDS_OWN):
        yield f"{key}.metric is {metric!r}, which says what guards did: name another metric of docs/metrics.md."
    elif known.rules_out(metric):
        yield f"{key}.metric is {metric!r}, which this run does not have{nearest(metric, known.names)}."


def _bound_problems(key: str, metric: str, condition: str, bound: float) -> Iterator[str]:
    """Bounds that the metric can never break."""
    lowest, highest = possible_values(metric)
    never = {
        "above": (bound >= highest, f"{metric} is at most {highest:g}"),
        "below": (bound <= lowest, f"{metric} is at least {lowest:g}"),
        "drop_below_average": (bound >= highest - lowest, f"{metric} lies between {lowest:g} and {highest:g}"),
    }
    is_never, why = never.get(condition, (False, ""))
    if is_never:
        yield (
            f"{key}.{condition} is {bound:g}, but {why}, so the guard would never act: choose another bound, or set "
            "its action to none."
        )


def _action_problems(config: RunConfig, key: str, settings: GuardSettings) -> Iterator[str]:
    trainer = config.trainer
    if settings.action == "skip_step" and settings.patience > 1:
        yield (
            f"{key}.patience is {settings.patience}, but its action skip_step decides about each update by itself: "
            "leave patience out."
        )
    for name in ("lr_factor", "min_lr_factor"):
        if settings.action == "lower_lr" and getattr(config.guard, name) == 1:
            yield f"{key}.action is lower_lr, but with guard.{name} 1 no learning rate is lowered: set it below 1."
    if settings.action != "rollback":
        return
    if trainer.save_freq < 1:
        yield (
            f"{key}.action is rollback, but trainer.save_freq is {trainer.save_freq}, so there are no checkpoints to "
            "go back to: set it, or choose another action."
        )
    if not config.data.shuffle:
        yield (
            f"{key}.action is rollback, but with data.shuffle false the same rows would come again in the same order: "
            "set it to true, or choose another action."
        )
    if trainer.kind == "rl" and config.rollout.replay_dir is not None:
        yield (
            f"{key}.action is rollback, but rollout.replay_dir replays the same rollouts again: choose another action."
        )
