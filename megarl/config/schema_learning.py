"""How the model learns: the `actor`, `critic` and `optim` sections."""

from dataclasses import dataclass, field

from megarl.config.fields import rules, setting

KL_ESTIMATORS = ("k1", "k1+", "k2", "k3", "k3+", "low_var_kl", "low_var_kl+", "abs", "abs+")

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


POLICY_LOSSES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "reinforce", "kl_cov", "clip_cov")

SEQUENCE_LOSSES = ("gspo", "sapo", "gmpo")
"""Losses that are defined as a mean over rows of means over tokens."""


ROUTER_REPLAY_MODES = ("disabled", "R2", "R3")


@dataclass(kw_only=True, slots=True)
class RouterReplayConfig:
    """Which experts the tokens of a mixture of experts go to in training."""

    mode: str = setting("disabled", choices=ROUTER_REPLAY_MODES)
    """disabled: those that the router chooses in each pass. R2: in updates, those that it chose when old log-probs were
    computed (arXiv:2507.18071). R3: in both, those that the engine chose (arXiv:2510.11370). The weights of the chosen
    experts have their gradient in any case. verl's name."""


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    """The policy's loss and its batches."""

    ppo_mini_batch_size: int = setting(256, at_least=1)
    """Prompts of one optimizer step over all ranks; each brings its `rollout.n` samples. Equal to
    `data.train_batch_size`, one step is one on-policy update. verl's name and default."""
    ppo_epochs: int = setting(1, at_least=1)
    """Times that each sample is trained on. verl's name and default."""
    max_tokens_per_micro_batch: int = setting(16384, at_least=1)
    """Tokens of one forward and backward pass on one data-parallel rank (its context-parallel ranks together). Bounds
    activation memory and never changes the result. verl's ppo_max_token_len_per_gpu, with its default."""
    skip_zero_advantage: bool = True
    """Whether samples whose advantage is exactly 0 (all samples of the prompt scored the same) are left out of the
    update. They cannot move the weights, so the result is the same and the time is saved; metrics of the update are
    then over the other samples. Without effect where `use_kl_loss` or `entropy_coeff` give them a gradient, or where
    samples move routers: `model.moe_aux_loss_coeff`, `moe_z_loss_coeff`, `moe_router_bias_update_rate`."""
    policy_loss: str = setting("ppo", choices=POLICY_LOSSES)
    """Loss of a token: ppo is the clipped surrogate with dual clip (arXiv:1707.06347, arXiv:1912.09729);
    docs/algorithms.md says what the others are and when to use them."""
    clip_ratio_low: float = setting(0.2, above=0, at_most=1)
    """How far the probability ratio may fall below 1 before its gradient stops (arXiv:1707.06347)."""
    clip_ratio_high: float = setting(0.2, above=0)
    """How far the ratio may rise above 1; larger than the lower bound is DAPO's clip-higher, with 0.28
    (arXiv:2503.14476)."""
    clip_ratio_c: float = setting(3.0, above=1)
    """Dual clip: for a negative advantage the loss stops growing at this ratio (arXiv:1912.09729)."""
    tau_pos: float = setting(1.0, above=0)
    """sapo: temperature of the gate for positive advantages (arXiv:2511.20347)."""
    tau_neg: float = setting(1.05, above=0)
    """sapo: temperature for negative advantages."""
    kl_cov_ratio: float = setting(0.0002, above=0, at_most=1)
    """kl_cov: share of the tokens of a mini-batch, those of largest covariance, that are penalised (arXiv:2505.22617).
    verl's name and default."""
    ppo_kl_coef: float = setting(0.1, at_least=0)
    """kl_cov: weight of the penalty. verl's name and default."""
    clip_cov_ratio: float = setting(0.0002, above=0, at_most=1)
    """clip_cov: share of the tokens that lose their gradient (arXiv:2505.22617). verl's name and default."""
    clip_cov_lb: float = 1.0
    """clip_cov: smallest covariance of these tokens. verl's name and default."""
    clip_cov_ub: float = 5.0
    """clip_cov: largest covariance of these tokens. verl's name and default."""
    loss_agg_mode: str | None = setting(None, choices=LOSS_AGG_MODES)
    """How token losses become one number, over the global mini-batch. token-mean is DAPO's (arXiv:2503.14476),
    seq-mean-token-mean the GRPO paper's, seq-mean-token-sum-norm Dr.GRPO's (arXiv:2503.20783). null: token-mean, and
    for gspo, sapo and gmpo, which are defined by it, seq-mean-token-mean."""
    loss_scale_factor: float | None = setting(None, above=0)
    """Divisor of a sample's summed loss in seq-mean-token-sum-norm, in tokens; null: `data.max_response_length`."""
    entropy_coeff: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus; 0: none, as in DAPO and in verl."""
    use_kl_loss: bool = False
    """Whether the loss holds the policy near the reference model, as in the GRPO paper (arXiv:2402.03300). Off, no
    reference model is loaded."""
    kl_loss_coef: float = setting(0.001, at_least=0)
    """Weight of that term, where `use_kl_loss` is on. verl's default; the GRPO paper has 0.04."""
    kl_loss_type: str = setting("low_var_kl", choices=KL_ESTIMATORS)
    """Estimator of the KL divergence of a token (joschu.net/blog/kl-approx.html): k1, k2, k3 (also called low_var_kl)
    or abs; with + the value is kept and the gradient is the unbiased one, k2's."""
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    """Which experts the tokens of a mixture of experts go to."""

    @property
    def aggregation(self) -> str:
        """`loss_agg_mode`, or what the policy loss has where it is null."""
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.policy_loss in SEQUENCE_LOSSES else "token-mean")


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """AdamW (arXiv:1711.05101) and its learning rate, for every kind of trainer."""

    lr: float = setting(1e-6, above=0)
    """Highest learning rate. verl's default for RL; SFT wants about 1e-5."""
    min_lr: float = setting(0.0, at_least=0)
    """Learning rate at the end of a decay."""
    lr_decay_style: str = setting("constant", choices=("constant", "linear", "cosine", "wsd"))
    """Course of the learning rate after warm-up, over the optimizer steps of the run; wsd is constant up to a decay at
    the end (warmup-stable-decay, arXiv:2404.06395). Megatron's and verl's name."""
    lr_wsd_decay_style: str = setting("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """With wsd: course of the decay; minus_sqrt is that of arXiv:2405.18392. Megatron's name and default."""
    lr_wsd_decay_steps: int | None = setting(None, at_least=1)
    """With wsd: optimizer steps of the decay; null: a tenth of the run's. Megatron's name, in steps."""
    lr_warmup_steps: int = setting(0, at_least=0)
    """Optimizer steps in which the learning rate rises from 0."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999], metadata=rules(at_least=0, at_most=1))
    """AdamW's two decay rates. verl's default; large-scale runs often take 0.95 for the second."""
    eps: float = setting(1e-8, above=0)
    """AdamW's constant in the denominator. PyTorch's default."""
    weight_decay: float = setting(0.01, at_least=0)
    """Decoupled weight decay, on matrices only. verl's default."""
    clip_grad: float = setting(1.0, above=0)
    """Largest norm of the gradient over all weights; a larger gradient is scaled down to it (arXiv:1211.5063)."""


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """The value model of `algorithm.adv_estimator: gae`, sharded as the actor is. Other estimators have none."""

    path: str | None = setting(None, local_path=True)
    """Folder of a Hugging Face model that the critic starts from: a language model, a reward model or a critic that
    was exported; null: `model.path`. A head that it does not bring starts at 0."""
    max_tokens_per_micro_batch: int | None = setting(None, at_least=1)
    """Tokens of one forward and backward pass on one data-parallel rank; null: the actor's."""
    ppo_epochs: int = setting(1, at_least=1)
    """Times that the critic is trained on each sample. verl's name."""
    cliprange_value: float = setting(0.5, above=0)
    """How far a value may move from the one before the update and still lower the loss (arXiv:1707.06347). verl's name
    and default."""
    loss_agg_mode: str = setting("token-mean", choices=LOSS_AGG_MODES)
    """How the losses of tokens become one number, as `actor.loss_agg_mode`."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """The critic's own optimizer. Its learning rate is verl's default, ten times the actor's: values have to follow
    the policy."""
