"""What a reward model learns: the `reward_model` section, for `trainer.kind: reward_model`."""

from dataclasses import dataclass

from megarl.config.fields import setting


@dataclass(kw_only=True, slots=True)
class RewardModelTrainingConfig:
    """Training of a reward model on pairs of responses, by preference or by the scores of a larger one."""

    pairwise_weight: float = setting(1.0, at_least=0)
    """Weight of the Bradley-Terry loss, -log sigmoid(chosen - rejected - margin) (arXiv:2203.02155; with a margin,
    arXiv:2307.09288)."""
    centering_coef: float = setting(0.0, at_least=0)
    """Weight of (chosen + rejected)^2, which keeps scores around 0 (arXiv:2312.09244); 0: none. TRL's
    center_rewards_coefficient, for which the paper has 0.01."""
    teacher: str | None = setting(None, local_path=True)
    """Folder of a larger reward model whose scores are learned too; null: none. Its tokenizer must be the model's.
    Its scores are computed once, before training, and kept in `trainer.default_local_dir`."""
    regression_weight: float = setting(1.0, at_least=0)
    """With a teacher: weight of the mean squared distance to its scores."""
