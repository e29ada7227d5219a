"""What watches over a run: the `guard` section. docs/guards.md says what each guard is for and recommends settings."""

from dataclasses import dataclass, field

from megarl.config.fields import setting

ACTIONS = ("none", "warn", "skip_step", "lower_lr", "rollback", "stop")
"""What a guard does when it fires, the mildest first."""


@dataclass(kw_only=True, slots=True)
class GuardSettings:
    """A guard over losses and gradients that are no numbers, and what all guards have."""

    patience: int = setting(1, at_least=1)
    """Steps in a row that have to break the bound before the guard fires."""
    action: str = setting("warn", choices=ACTIONS)
    """What is done then: a warning, this update left out, the learning rate lowered, the run taken back to its last
    good checkpoint, or ended. none: nothing is watched."""


@dataclass(kw_only=True, slots=True)
class WindowedGuard(GuardSettings):
    """A guard that looks at several steps."""

    window: int = setting(1, at_least=1)
    """Steps of the moving average: with `above` and `below` it is what is compared; with `drop_below_average` and
    `times_average` it is of the steps before the one that is judged. Nothing is judged until there are as many."""


@dataclass(kw_only=True, slots=True)
class AboveGuard(WindowedGuard):
    """A guard over what must stay below a bound."""

    above: float = 0.0
    """Fires where the metric's average over the window is above this."""


@dataclass(kw_only=True, slots=True)
class BelowGuard(WindowedGuard):
    """A guard over what must stay above a bound."""

    below: float = 0.0
    """Fires where the metric's average over the window is below this."""


@dataclass(kw_only=True, slots=True)
class DropGuard(WindowedGuard):
    """A guard over what must not fall."""

    drop_below_average: float = setting(0.25, above=0)
    """Fires where the metric is more than this below its moving average; in the metric's own unit."""


@dataclass(kw_only=True, slots=True)
class SpikeGuard(WindowedGuard):
    """A guard over what must not jump."""

    times_average: float = setting(10.0, above=1)
    """Fires where the metric is more than so many times its moving average."""


@dataclass(kw_only=True, slots=True)
class GuardRule(WindowedGuard):
    """A guard over any metric."""

    metric: str = ""
    """Name of docs/metrics.md."""
    above: float | None = None
    """As of guard.kl."""
    below: float | None = None
    """As of guard.entropy."""
    drop_below_average: float | None = setting(None, above=0)
    """As of guard.reward."""
    times_average: float | None = setting(None, above=1)
    """As of guard.grad_norm."""
    not_finite: bool = False
    """Fires where the metric is NaN or infinite."""


CONDITIONS = ("above", "below", "drop_below_average", "times_average", "not_finite")
"""Keys of a `GuardRule` of which it has exactly one."""


@dataclass(kw_only=True, slots=True)
class GuardConfig:
    """What watches over a run and acts by itself: a bound on a metric, and what happens where it is broken. kl is how
    far the policy moved within a step (`actor/ppo_kl`), reference_kl how far it is from the reference (`critic/kl`,
    `actor/kl_loss`), reward the mean score (`critic/score/mean`), entropy the policy's (`actor/entropy`), grad_norm
    every gradient's, rollout_gap the mean difference of log-probs between engine and trainer
    (`rollout_corr/logprob_diff_mean`), cut_off the share of responses that were cut off (`response_length/clip_ratio`),
    value_loss the critic's (`critic/vf_loss`), nan every loss and gradient. docs/guards.md."""

    kl: AboveGuard = field(default_factory=lambda: AboveGuard(above=0.1))
    """How far the policy moved within a step."""
    reference_kl: AboveGuard = field(default_factory=lambda: AboveGuard(above=0.5, window=5))
    """How far the policy is from the reference model."""
    reward: DropGuard = field(default_factory=lambda: DropGuard(drop_below_average=0.25, window=20, patience=3))
    """The mean score."""
    entropy: BelowGuard = field(default_factory=lambda: BelowGuard(below=0.05, window=10))
    """The policy's entropy."""
    grad_norm: SpikeGuard = field(default_factory=lambda: SpikeGuard(times_average=10.0, window=20))
    """Norms of gradients."""
    rollout_gap: AboveGuard = field(default_factory=lambda: AboveGuard(above=0.1, window=2))
    """Difference of log-probs between engine and trainer."""
    cut_off: AboveGuard = field(default_factory=lambda: AboveGuard(above=0.5, window=3))
    """Share of responses that were cut off."""
    value_loss: SpikeGuard = field(default_factory=lambda: SpikeGuard(times_average=10.0, window=20))
    """The critic's loss."""
    nan: GuardSettings = field(default_factory=lambda: GuardSettings(patience=3, action="stop"))
    """Losses and gradients that are NaN or infinite."""
    rules: list[GuardRule] = field(default_factory=list)
    """Further guards over any metric, each with `metric`, one of `above`, `below`, `drop_below_average`,
    `times_average` and `not_finite`, and `window`, `patience` and `action` as above, e.g.
    `[{metric: perf/max_memory_gb, above: 75, action: warn}]`."""
    lr_factor: float = setting(0.5, above=0, at_most=1)
    """What `lower_lr` multiplies the learning rates of the rest of the run by, each time that it acts."""
    min_lr_factor: float = setting(0.01, above=0, at_most=1)
    """The smallest share of the configured learning rates that `lower_lr` and `rollback` go down to."""
    rollback_lr_factor: float = setting(1.0, above=0, at_most=1)
    """What each `rollback` multiplies the learning rates by; 1: another order of the data is all that changes."""
    max_rollbacks: int = setting(2, at_least=1)
    """Rollbacks of the whole run; where one more would be needed, the run ends."""
    max_skipped_steps: int = setting(10, at_least=1)
    """Steps in a row all of whose updates guards left out, after which the run ends: it learns nothing any more."""
