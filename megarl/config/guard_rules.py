"""The guards of a run as a list of rules: those of the `guard` section's names, and its own `guard.rules`."""

from dataclasses import dataclass

from megarl.config.schema import RunConfig
from megarl.config.schema_guard import CONDITIONS, GuardConfig, GuardRule, GuardSettings

_DEFAULTS = GuardConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A bound on one metric, and what happens where it is broken."""

    name: str
    """For people: that of the guard, or the metric of one of `guard.rules`."""
    key: str
    """Where it is set, e.g. `guard.kl`."""
    metric: str
    condition: str
    """One of `CONDITIONS`."""
    bound: float
    """Of the condition; 0 for `not_finite`."""
    window: int
    patience: int
    action: str
    advice: str = ""
    """What may be the reason, and what to do."""

    @property
    def steps_looked_at(self) -> int:
        """Of how many steps, up to the last, a decision is made; an average of earlier steps is no part of it."""
        return self.patience + (self.window - 1 if self.condition in ("above", "below") else 0)

    @property
    def values_needed(self) -> int:
        """Of the metric, before the rule can fire."""
        compares_with_before = self.condition in ("drop_below_average", "times_average")
        return self.steps_looked_at + (self.window if compares_with_before else 0)

    @property
    def id(self) -> str:
        """What its history is kept under: a rule that says something else begins anew."""
        return f"{self.metric} {self.condition} {self.bound:g} window {self.window} {self.action}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedGuard:
    """What a guard with a name of its own watches."""

    metrics: tuple[str, ...]
    """Those of them that a run has are watched, each by itself."""
    condition: str
    advice: str


NAMED_GUARDS = {
    "kl": NamedGuard(
        metrics=("actor/ppo_kl",),
        condition="above",
        advice="the policy moves too far within a step: lower optim.lr or actor.ppo_epochs",
    ),
    "reference_kl": NamedGuard(
        metrics=("critic/kl", "actor/kl_loss"),
        condition="above",
        advice="the policy leaves the reference: raise algorithm.kl_ctrl.kl_coef or actor.kl_loss_coef, and look at "
        "what it writes",
    ),
    "reward": NamedGuard(
        metrics=("critic/score/mean",),
        condition="drop_below_average",
        advice="look at the latest responses; where they have become worse, go back to an earlier checkpoint with a "
        "lower optim.lr",
    ),
    "entropy": NamedGuard(
        metrics=("actor/entropy",),
        condition="below",
        advice="the policy hardly explores any more: raise actor.clip_ratio_high or actor.entropy_coeff, or take "
        "prompts that it does not solve yet",
    ),
    "grad_norm": NamedGuard(
        metrics=("actor/grad_norm", "critic/grad_norm", "train/grad_norm"),
        condition="times_average",
        advice="look at the data of this step; where it happens often, lower optim.lr",
    ),
    "rollout_gap": NamedGuard(
        metrics=("rollout_corr/logprob_diff_mean",),
        condition="above",
        advice="the engine does not sample the policy that is trained: compare its dtype and sampling settings, or use "
        "algorithm.rollout_correction",
    ),
    "cut_off": NamedGuard(
        metrics=("response_length/clip_ratio",),
        condition="above",
        advice="responses that are cut off at data.max_response_length have no ending: raise it, or see whether the "
        "model ever writes its end token",
    ),
    "value_loss": NamedGuard(
        metrics=("critic/vf_loss",),
        condition="times_average",
        advice="the critic is losing the policy: lower critic.optim.lr, or look at the scale of the rewards",
    ),
}

_NAN_GRADIENT = ("actor/skipped_updates", "critic/skipped_updates", "train/skipped_updates")
_NAN_LOSS = ("actor/pg_loss", "actor/kl_loss", "critic/vf_loss", "train/loss")
_NAN_METRICS = (*_NAN_GRADIENT, *_NAN_LOSS)


def guard_metrics(name: str) -> tuple[str, ...]:
    """The metrics that the guard of this name watches."""
    return _NAN_METRICS if name == "nan" else NAMED_GUARDS[name].metrics


def guard_rules(config: RunConfig) -> list[Rule]:
    """All rules of a config whose action is not none, those of `guard.nan` first."""
    named = [
        _rule(name, f"guard.{name}", metric, getattr(config.guard, name), guard.condition, guard.advice)
        for name, guard in NAMED_GUARDS.items()
        for metric in guard.metrics
    ]
    own = [
        _rule(rule.metric, f"guard.rules[{number}]", rule.metric, rule, condition_of(rule), "")
        for number, rule in enumerate(config.guard.rules)
    ]
    return [rule for rule in (*_nan_rules(config), *named, *own) if rule.action != "none"]


def is_set(config: RunConfig, key: str) -> bool:
    """Whether a person has set a guard in this config.

    Args:
        key: of `Rule`.
    """
    if key.startswith("guard.rules"):
        return True
    name = key.removeprefix("guard.")
    return bool(getattr(config.guard, name) != getattr(_DEFAULTS, name))


def condition_of(rule: GuardRule) -> str:
    """The one of `CONDITIONS` that the rule has; of several, the first.

    Raises:
        ValueError: it has none.
    """
    found = given_conditions(rule)
    if not found:
        raise ValueError(f"a rule over {rule.metric} without a condition")
    return found[0]


def given_conditions(rule: GuardRule) -> list[str]:
    """Those of `CONDITIONS` that are set."""
    return [name for name in CONDITIONS if getattr(rule, name) is not None and getattr(rule, name) is not False]


def _rule(name: str, key: str, metric: str, settings: GuardSettings, condition: str, advice: str) -> Rule:
    return Rule(
        name=name,
        key=key,
        metric=metric,
        condition=condition,
        # guard.nan has none: it counts updates that were left out, of which there should be 0.
        bound=0.0 if condition == "not_finite" else float(getattr(settings, condition, 0.0)),
        window=getattr(settings, "window", 1),
        patience=settings.patience,
        action=settings.action,
        advice=advice,
    )


def _nan_rules(config: RunConfig) -> list[Rule]:
    settings = config.guard.nan
    data = "the rewards of these steps" if config.trainer.kind == "rl" else "the data"
    look = f"lower optim.lr, or look at {data}"
    gradient = f"the gradient was NaN or infinite, so the weights are those of before: {look}"
    return [
        *(_rule("nan", "guard.nan", name, settings, "above", gradient) for name in _NAN_GRADIENT),
        *(_rule("nan", "guard.nan", name, settings, "not_finite", look) for name in _NAN_LOSS),
    ]
