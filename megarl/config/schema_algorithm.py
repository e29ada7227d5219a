"""From rewards to what the loss is given: the `algorithm` section."""

from dataclasses import dataclass, field

from megarl.config.fields import rules, setting
from megarl.config.schema_learning import KL_ESTIMATORS

GROUP_ESTIMATORS = ("grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline")
"""Advantage estimators that compare the samples of a prompt."""

ADVANTAGE_ESTIMATORS = ("gae", *GROUP_ESTIMATORS, "reinforce_plus_plus", "remax")


REJECTION_RULES = ("none", *(f"{level}_{name}" for level in ("token", "sequence") for name in ("k1", "k2", "k3")))


@dataclass(kw_only=True, slots=True)
class KLControlConfig:
    """The weight of the KL penalty in the reward."""

    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """fixed keeps `kl_coef`; adaptive moves it towards a KL divergence of `target_kl` (arXiv:1909.08593)."""
    kl_coef: float = setting(0.001, at_least=0)
    """The weight, with adaptive the first one. verl's default."""
    target_kl: float = setting(0.1, above=0)
    """KL divergence per token that adaptive aims at. verl's default."""
    horizon: int = setting(10_000, above=0)
    """Samples in which adaptive moves the weight by as much as the divergence is off. verl's default."""


@dataclass(kw_only=True, slots=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups that teach nothing are replaced by further prompts."""

    enable: bool = False
    """Whether groups whose samples all have the same metric are dropped, and prompts drawn until the batch is full."""
    metric: str = "score"
    """The number that is compared: `score`, or the name of a number that the reward function returns. verl's name."""
    max_num_gen_batches: int = setting(10, at_least=1)
    """Batches of prompts that one step may generate. verl's name and DAPO's value."""
    on_exhausted: str = setting("error", choices=("error", "smaller_batch"))
    """What happens when the batch is not full after that many: the run ends with a message, or the step trains on the
    groups there are."""


@dataclass(kw_only=True, slots=True)
class PolicyFilteringConfig:
    """PF-PPO (arXiv:2409.06957): samples with telling rewards are trained on more often."""

    enable: bool = False
    """Whether each step trains on samples drawn from the recent ones, with weights by reward."""
    reweight_method: str = setting("pow", choices=("pow", "max_min", "max_random"))
    """The weights: |score|^weight_pow; 1 for the best and the worst score of all and 0 for others; or 0.4 for the best
    and 0.1 for others. verl's name."""
    weight_pow: float = setting(2.0, at_least=0)
    """The exponent of pow. verl's default."""
    buffer_size: int = setting(0, at_least=0)
    """Samples of earlier steps that are kept to draw from; 0: those of the step alone."""


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig:
    """What is done about the engine's probabilities being other than the trainer's."""

    rollout_is: str = setting("none", choices=("none", "token", "sequence"))
    """Importance weight on the loss of a token: none, exp(old − rollout log-prob) of the token, or of its whole
    response. verl's name. How far the two are apart is measured in any case (docs/metrics.md)."""
    rollout_is_threshold: float = setting(2.0, above=0)
    """Largest weight; larger ones are cut to it (truncated importance sampling). verl's name and default."""
    rollout_is_lower: float | None = setting(None, at_least=0)
    """With a number, weights outside [this, rollout_is_threshold] become 0 instead of being cut (IcePop); null: cut."""
    rollout_rs: str = setting("none", choices=REJECTION_RULES)
    """Tokens (or whole responses, by the mean over their tokens) whose estimate of the divergence of trainer and engine
    is out of bounds are left out of the update: which estimator, of docs/algorithms.md."""
    rollout_rs_threshold: float = setting(2.0, above=0)
    """Upper bound of that estimate; for k1 of the probability ratio, whose lower bound is the reciprocal."""


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """From rewards to advantages."""

    adv_estimator: str = setting("grpo", choices=ADVANTAGE_ESTIMATORS)
    """Advantage of a token or a sample; docs/algorithms.md says what each is and when to use it. gae has a critic."""
    norm_adv_by_std: bool = True
    """Whether grpo divides by the standard deviation of the group; false is Dr.GRPO (arXiv:2503.20783). verl's
    norm_adv_by_std_in_grpo."""
    normalize_advantages: bool = True
    """Whether gae's advantages are made to have mean 0 and standard deviation 1 over the tokens of the step."""
    gamma: float = setting(1.0, above=0, at_most=1)
    """Discount of a reward for each token that it comes later. verl's name and default."""
    lam: float = setting(1.0, at_least=0, at_most=1)
    """λ of gae: 1 trusts the rewards alone, smaller trusts the critic more (arXiv:1506.02438). verl's name and
    default."""
    use_kl_in_reward: bool = False
    """Whether each token's reward is lowered by `kl_ctrl.kl_coef` times its KL estimate against the reference model
    (arXiv:1909.08593). `actor.use_kl_loss` is the other way to hold the policy near it. verl's name."""
    kl_penalty: str = setting("k1", choices=KL_ESTIMATORS)
    """Estimator of that KL divergence. verl's name and default, there called kl."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """The weight of the KL penalty in the reward."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Dynamic sampling."""
    pf_ppo: PolicyFilteringConfig = field(default_factory=PolicyFilteringConfig)
    """Policy filtering."""
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    """Engine–trainer correction."""
    gdpo_reward_keys: list[str] = field(default_factory=list)
    """gdpo: names of the numbers that the reward function returns and that are rewards of their own. verl's name."""
    gdpo_reward_weights: list[float] = field(default_factory=list)
    """gdpo: the weight of each of them, in the same order; empty: 1 each. verl's name."""
    plugins: list[str] = field(default_factory=list, metadata=rules(local_path=True))
    """Python files that register further estimators or policy losses under names of their own (docs/algorithms.md)."""
