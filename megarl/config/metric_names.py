"""Which metrics a run will have, as far as its config tells. docs/metrics.md says what they mean."""

import math
from dataclasses import dataclass

from megarl.config.schema import RunConfig
from megarl.config.schema_algorithm import ADVANTAGE_ESTIMATORS
from megarl.config.schema_preference import PREFERENCE_LOSSES

_FAMILIES = ("actor", "critic", "train", "response_length", "prompt_length", "critic/score", "training")
"""Those that a run of one kind has, and no run of another kind."""
_SUMMARY = ("mean", "max", "min")
_OPTIMIZER = ("grad_norm", "lr", "skipped_updates")
_REWARD_MODEL = ("accuracy", "margin", "chosen_score", "rejected_score")
_TEACHER = ("regression", "kl_to_teacher", "agreement_with_teacher")
_PREFERENCE = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownMetrics:
    """Metrics by name, and the families (what is before the last slash) that these are all of."""

    names: frozenset[str]
    closed_families: frozenset[str]

    def rules_out(self, metric: str) -> bool:
        """Whether it is certain that a run has no such metric. Of the other families, the run itself tells."""
        family = metric.rpartition("/")[0]
        return family in self.closed_families and metric not in self.names


def known_metrics(config: RunConfig) -> KnownMetrics:
    """Those of a config."""
    names = _rl_metrics(config) if config.trainer.kind == "rl" else _supervised_metrics(config)
    families = {*_FAMILIES, *(name.rpartition("/")[0] for name in names)}
    if config.trainer.kind == "preference" and config.preference.loss_type not in PREFERENCE_LOSSES:
        families -= {family for family in families if family.startswith("train")}  # a person's own loss names its own
    return KnownMetrics(names=frozenset(names), closed_families=frozenset(families))


def _rl_metrics(config: RunConfig) -> set[str]:
    others = {f"{what}_length/{kind}" for what in ("prompt", "response") for kind in (*_SUMMARY, "clip_ratio")}
    actor = {"pg_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "entropy", "selected_fraction", *_OPTIMIZER}
    actor |= {"kl_loss"} if config.actor.use_kl_loss else set()
    critic = {f"{what}/{kind}" for what in ("score", "rewards", "advantages", "returns", "values") for kind in _SUMMARY}
    critic |= {"kl", "kl_coeff"} if config.algorithm.use_kl_in_reward else set()
    # An estimator of a person's own may have a critic.
    if config.algorithm.adv_estimator == "gae" or config.algorithm.adv_estimator not in ADVANTAGE_ESTIMATORS:
        critic |= {"vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", *_OPTIMIZER}
    others |= {"training/epoch", "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"}
    return others | {f"actor/{name}" for name in actor} | {f"critic/{name}" for name in critic}


def _supervised_metrics(config: RunConfig) -> set[str]:
    names = {"loss", *_OPTIMIZER}
    if config.trainer.kind == "reward_model":
        names |= {*_REWARD_MODEL, *(_TEACHER if config.reward_model.teacher is not None else ())}
    if config.trainer.kind == "preference":
        names |= {*_PREFERENCE, "kl" if config.preference.loss_type == "kto" else "rewards/margins"}
    return {"training/epoch", *(f"train/{name}" for name in names)}


_SHARES = (
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/selected_fraction",
    "batch/padding_fraction",
    "critic/vf_clipfrac",
    "prompt_length/clip_ratio",
    "response_length/clip_ratio",
)
_NEVER_NEGATIVE = ("actor/entropy", "critic/vf_loss", "training/epoch")
_NEVER_NEGATIVE_FAMILIES = ("perf", "timing_s", "prompt_length", "response_length")
_NEVER_NEGATIVE_NAMES = ("grad_norm", "skipped_updates")
"""Of every model."""


def possible_values(metric: str) -> tuple[float, float]:
    """The smallest and the largest value that a metric can have, as far as its name tells."""
    family, _, name = metric.rpartition("/")
    if metric in _SHARES:
        return 0.0, 1.0
    of_model = family in ("actor", "critic", "train") and name in _NEVER_NEGATIVE_NAMES
    if metric in _NEVER_NEGATIVE or family in _NEVER_NEGATIVE_FAMILIES or of_model:
        return 0.0, math.inf
    return -math.inf, math.inf


def is_of_evaluation(metric: str) -> bool:
    """Whether only evaluations have it."""
    return metric.partition("/")[0] in ("val", "val-core", "val-aux")
