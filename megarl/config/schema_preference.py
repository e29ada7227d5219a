"""Preference optimisation: the `preference` section, for `trainer.kind: preference`."""

from dataclasses import dataclass

from megarl.config.fields import setting

PREFERENCE_LOSSES = ("dpo", "ipo", "kto", "sppo", "spin")


@dataclass(kw_only=True, slots=True)
class PreferenceConfig:
    """Preference optimisation: learning from pairs of responses, or from labelled ones, without a reward model."""

    loss_type: str = setting("dpo", choices=PREFERENCE_LOSSES)
    """dpo (arXiv:2305.18290), ipo (arXiv:2310.12036), kto (arXiv:2402.01306), sppo (arXiv:2405.00675) or spin
    (arXiv:2401.01335); docs/algorithms.md says when to use which. TRL's name, with sigmoid for dpo and sppo_hard for
    sppo. Files of `algorithm.plugins` add others."""
    beta: float = setting(0.1, above=0)
    """How firmly the policy is held to the reference: the papers' beta, ipo's tau, spin's lambda, and for sppo 1/eta,
    for which its paper has 0.001. TRL's name and default."""
    label_smoothing: float = setting(0.0, at_least=0, at_most=0.49)
    """dpo: the chance that a preference is the wrong way round (conservative DPO); at one half there is nothing left to
    learn. TRL's name and default."""
    desirable_weight: float = setting(1.0, at_least=0)
    """kto: weight of good responses. With few of them, raise it until weight x number is 1 to 4/3 times that of the bad
    ones (the paper, section 4.2). TRL's name and default."""
    undesirable_weight: float = setting(1.0, at_least=0)
    """kto: weight of bad responses. TRL's name and default."""
    rounds: int = setting(0, at_least=0)
    """Rounds that begin with generating: the policy answers the prompts of `data.train_files`, the answers become
    pairs, and the policy as it was is the reference. spin pairs each answer with the data's; other losses the best and
    the worst of `rollout.n` by their scores (`reward`). `trainer.total_epochs` and `trainer.total_training_steps` are
    those of one round. 0: the files hold pairs already."""
    prompts_per_round: int | None = setting(None, at_least=1)
    """Prompts that a round generates from, each round the next ones; null: all."""
    win_rate: str = setting("bradley_terry", choices=("bradley_terry", "hard"))
    """sppo, with rounds: how scores become the chance of being preferred: by sigmoid(score - other score), which fits
    the scores of a reward model, or always to the higher one, which fits graders."""
