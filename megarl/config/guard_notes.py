"""Guards that a person has set and that cannot act in this run, although in a longer one they would.

Their settings may be right all the same: a config for thousands of steps is tried with five. So these are notes, while
guards that could act in no run are problems (`validate_guard`). Imports no torch.
"""

from collections.abc import Iterator

from megarl.config.guard_rules import Rule, guard_rules, is_set
from megarl.config.metric_names import is_of_evaluation
from megarl.config.schema import RunConfig

_LOSSES_WITH_OLD_LOGPROBS = ("kl_cov", "clip_cov")
"""Those of megarl's policy losses that need them computed before the update, which leaves a rounding error."""


def guard_notes(config: RunConfig, total_steps: int | None) -> Iterator[str]:
    """One sentence for each guard that cannot act.

    Args:
        total_steps: of the whole run; None where they are not known yet.
    """
    noted = set()
    for rule in guard_rules(config):
        if rule.key in noted or not is_set(config, rule.key):
            continue
        note = _of_length(config, rule, total_steps) or _of_single_update(config, rule)
        if note is not None:
            noted.add(rule.key)
            yield f"note: {rule.key} cannot act in this run: {note}"


def _of_length(config: RunConfig, rule: Rule, total_steps: int | None) -> str | None:
    if total_steps is None:
        return None
    values = _most_values(config, rule.metric, total_steps)
    if rule.values_needed <= values:
        return None
    return (
        f"it needs {rule.values_needed} values of {rule.metric} (window {rule.window}, patience {rule.patience}), and "
        f"{total_steps} steps give at most {values}."
    )


def _most_values(config: RunConfig, metric: str, total_steps: int) -> int:
    trainer = config.trainer
    if is_of_evaluation(metric):
        return -(-total_steps // trainer.test_freq)  # one after the last step too
    if trainer.kind == "rl" and metric.startswith("actor/"):
        return max(total_steps - trainer.critic_warmup, 0)
    return total_steps


def _of_single_update(config: RunConfig, rule: Rule) -> str | None:
    zero_breaks_it = {"above": rule.bound < 0, "below": rule.bound > 0, "not_finite": True}.get(rule.condition, False)
    if rule.metric != "actor/ppo_kl" or config.trainer.kind != "rl" or zero_breaks_it:
        return None
    actor, algorithm = config.actor, config.algorithm
    correction = algorithm.rollout_correction
    is_apart = (
        algorithm.use_kl_in_reward
        or (correction.rollout_is, correction.rollout_rs) != ("none", "none")
        or actor.policy_loss in _LOSSES_WITH_OLD_LOGPROBS
        or bool(algorithm.plugins)
    )
    if is_apart or config.data.train_batch_size != actor.ppo_mini_batch_size or actor.ppo_epochs > 1:
        return None
    return (
        f"{rule.metric} is 0 with a single update a step (actor.ppo_mini_batch_size {actor.ppo_mini_batch_size} of "
        f"data.train_batch_size {config.data.train_batch_size}, actor.ppo_epochs 1)."
    )
