"""Rules between the settings of a reinforcement-learning run. Imports no torch."""

from collections.abc import Iterator

from megarl.config.layout import Layout
from megarl.config.model_shape import ModelShape
from megarl.config.schema import RunConfig
from megarl.config.schema_algorithm import ADVANTAGE_ESTIMATORS, GROUP_ESTIMATORS
from megarl.config.schema_learning import SEQUENCE_LOSSES
from megarl.config.server_rules import server_problems
from megarl.config.sglang_options import (
    CACHE_OPTION,
    DEFAULT_MASK,
    EXPERT_OPTION,
    MASK_HEADROOM,
    MASK_OPTION,
    option_problems,
)
from megarl.config.validate_models import other_model_problems


def rl_problems(config: RunConfig, layout: Layout, model: ModelShape | None) -> Iterator[str]:
    """What is wrong with a config of `trainer.kind: rl`, beyond what concerns every kind."""
    yield from engine_problems(config, layout.world_size, model)
    yield from _estimator_problems(config)
    yield from _loss_problems(config)
    yield from _router_replay_problems(config, model)
    yield from _kl_problems(config)
    yield from reward_problems(config)
    yield from _correction_problems(config)
    yield from _other_model_problems(config, layout)


def engine_problems(config: RunConfig, world_size: int, model: ModelShape | None) -> Iterator[str]:
    """What is wrong with what generates, and with how it samples."""
    rollout, size = config.rollout, config.rollout.tensor_model_parallel_size
    key = "rollout.tensor_model_parallel_size"
    if rollout.val_kwargs.temperature == 0 and rollout.val_kwargs.n > 1:
        yield (
            f"rollout.val_kwargs.n is {rollout.val_kwargs.n}, but with rollout.val_kwargs.temperature 0 all samples of "
            "a prompt are the same: set n to 1, or raise the temperature."
        )
    if 0 in (rollout.top_k, rollout.val_kwargs.top_k):
        yield "rollout.top_k and rollout.val_kwargs.top_k cannot be 0: write -1 to sample from all tokens."
    yield from _sglang_problems(config)
    yield from server_problems(config, world_size)
    if rollout.engine in ("transformers", "dataset") and size > 1:
        yield f"{key} is {size}, but the transformers engine holds the whole model on each rank: set it to 1."
    elif size >= 1 and world_size % size and not rollout.servers:
        yield f"{key} is {size}, which does not divide the world size {world_size}: choose a divisor of it."
    elif size >= 1 and model is not None and model.num_heads % size:
        yield f"{key} is {size}, which does not divide the model's {model.num_heads} attention heads: choose a divisor."


def _sglang_problems(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine != "sglang":  # what a base config says of SGLang does not stop another engine
        return
    problems = list(option_problems(rollout.sglang))
    yield from problems
    if problems:
        return
    experts, size = rollout.sglang.get(EXPERT_OPTION, 1), rollout.tensor_model_parallel_size
    if size % experts:
        yield (
            f"rollout.sglang.{EXPERT_OPTION} is {experts}, which does not divide rollout.tensor_model_parallel_size "
            f"{size}: choose a divisor of it."
        )
    longest, room = config.data.max_prompt_length + config.data.max_response_length, rollout.sglang.get(CACHE_OPTION)
    if isinstance(room, int) and room < longest:
        yield (
            f"rollout.sglang.{CACHE_OPTION} is {room}, but one prompt with its response may have {longest} tokens "
            "(data.max_prompt_length + data.max_response_length): set it to at least that."
        )
    kept = rollout.sglang.get(MASK_OPTION, DEFAULT_MASK) - MASK_HEADROOM
    for key, top_k in {"rollout.top_k": rollout.top_k, "rollout.val_kwargs.top_k": rollout.val_kwargs.top_k}.items():
        if top_k > kept:
            yield (
                f"{key} is {top_k}, but SGLang gives log-probs of at most {kept} tokens: lower it, or set "
                f"rollout.sglang.{MASK_OPTION} to at least {top_k + MASK_HEADROOM}."
            )


def _estimator_problems(config: RunConfig) -> Iterator[str]:
    algorithm, n = config.algorithm, config.rollout.n
    name = algorithm.adv_estimator
    if name in GROUP_ESTIMATORS and n == 1:
        yield (
            f"algorithm.adv_estimator {name} compares the samples of a prompt, but rollout.n is 1: set it to at least "
            "2."
        )
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    if steps is not None and warmup and warmup >= steps:
        yield (
            f"trainer.critic_warmup is {warmup} steps of trainer.total_training_steps {steps}, so the actor would "
            "never learn: shorten the warm-up."
        )
    if name != "gae" and config.trainer.critic_warmup:
        yield (
            f"trainer.critic_warmup is {config.trainer.critic_warmup}, but algorithm.adv_estimator {name} has no "
            "critic: set it to 0, or choose gae."
        )
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if name == "gdpo" and not keys:
        yield "algorithm.adv_estimator gdpo has a reward of its own for each of algorithm.gdpo_reward_keys: name some."
    if weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} algorithm.gdpo_reward_keys: "
            "give one for each, or none."
        )
    if name == "gdpo" and algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward does not go with gdpo, which has several rewards: use actor.use_kl_loss."
    if algorithm.pf_ppo.enable and name in (*GROUP_ESTIMATORS, "remax"):
        yield (
            f"algorithm.pf_ppo draws samples anew, but algorithm.adv_estimator {name} needs those of a prompt "
            "together: choose gae or reinforce_plus_plus."
        )
    if keys and name != "gdpo" and name in ADVANTAGE_ESTIMATORS:
        yield f"algorithm.gdpo_reward_keys are for gdpo, but algorithm.adv_estimator is {name}: leave them out."
    if algorithm.filter_groups.enable and n == 1:
        yield (
            "algorithm.filter_groups keeps prompts whose samples differ, but rollout.n is 1: set it to at least 2, or "
            "switch it off."
        )
    yield from _given_responses_problems(config)


def _given_responses_problems(config: RunConfig) -> Iterator[str]:
    """Where responses are read instead of generated."""
    algorithm, rollout = config.algorithm, config.rollout
    sources = {
        "rollout.replay_dir replays what was generated": rollout.replay_dir is not None,
        "rollout.engine dataset reads what was generated": rollout.engine == "dataset",
    }
    given = [source for source, is_used in sources.items() if is_used]
    if len(given) > 1:
        yield f"rollout.engine dataset and rollout.replay_dir {rollout.replay_dir} both give responses: leave one out."
    uses = {
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "algorithm.adv_estimator remax": algorithm.adv_estimator == "remax",
    }
    for key, is_on in uses.items():
        if is_on and given:
            yield f"{key} needs to generate, but {given[0]}: leave one out."


def _loss_problems(config: RunConfig) -> Iterator[str]:
    actor = config.actor
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor.use_kl_loss is true, but actor.kl_loss_coef is 0: set use_kl_loss to false, or give it a weight."
    if actor.policy_loss in SEQUENCE_LOSSES and actor.aggregation != "seq-mean-token-mean":
        yield (
            f"actor.policy_loss {actor.policy_loss} is defined with seq-mean-token-mean, but actor.loss_agg_mode is "
            f"{actor.loss_agg_mode}: leave it out."
        )
    if actor.loss_scale_factor is not None and actor.aggregation != "seq-mean-token-sum-norm":
        yield (
            f"actor.loss_scale_factor is {actor.loss_scale_factor}, but actor.loss_agg_mode {actor.aggregation} does "
            "not use it: leave it out, or choose seq-mean-token-sum-norm."
        )


def _router_replay_problems(config: RunConfig, model: ModelShape | None) -> Iterator[str]:
    mode = config.actor.router_replay.mode
    if mode not in ("R2", "R3"):
        return
    if model is not None and not model.is_moe:
        yield f"actor.router_replay.mode is {mode}, but a {model.model_type} model has no experts: set it to disabled."
    if mode == "R3" and config.rollout.engine == "dataset":
        yield (
            "actor.router_replay.mode is R3, but responses of rollout.engine dataset come without the experts that an "
            "engine chose: set it to R2 or disabled."
        )


def _kl_problems(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield (
            "algorithm.kl_ctrl.type is adaptive, but algorithm.use_kl_in_reward is false, so there is no penalty to "
            "adapt: set it to true, or leave type out."
        )
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        yield (
            "algorithm.use_kl_in_reward is true, but algorithm.kl_ctrl.kl_coef is 0: set use_kl_in_reward to false, or "
            "give it a weight."
        )


def reward_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with how responses are scored."""
    reward, limit = config.reward, config.data.max_response_length
    if not reward.rule_weight and reward.model.path is None:
        weight = "null" if reward.rule_weight is None else "0"
        yield f"reward.rule_weight is {weight} and reward.model.path is null, so nothing scores: set one of them."
    if reward.overlong_buffer.enable and reward.overlong_buffer.len > limit:
        yield (
            f"reward.overlong_buffer.len is {reward.overlong_buffer.len} tokens, more than data.max_response_length "
            f"{limit}: set it to at most that."
        )


def _correction_problems(config: RunConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    lower, upper = correction.rollout_is_lower, correction.rollout_is_threshold
    section = "algorithm.rollout_correction"
    if lower is not None and correction.rollout_is == "none":
        yield f"{section}.rollout_is_lower is {lower}, but {section}.rollout_is is none: choose token or sequence."
    if correction.rollout_rs.endswith("k1") and correction.rollout_rs_threshold < 1:
        yield (
            f"{section}.rollout_rs_threshold is {correction.rollout_rs_threshold}, but for {correction.rollout_rs} it "
            "is a ratio, whose lower bound is the reciprocal: set it above 1."
        )
    if lower is not None and lower >= upper:
        yield f"{section}.rollout_is_lower {lower} is not below {section}.rollout_is_threshold {upper}: lower it."


def _other_model_problems(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Critic and reward model stand in the actor's layout."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    critic, reward = config.critic, config.reward.model
    models = {
        "critic": (critic.path, critic.max_tokens_per_micro_batch),
        "reward.model": (reward.path, reward.max_tokens_per_micro_batch),
    }
    for section, (path, limit) in models.items():
        if limit is not None and limit < longest:
            yield (
                f"{section}.max_tokens_per_micro_batch is {limit} tokens, but one sample may have {longest}: set it to "
                "at least that."
            )
        yield from other_model_problems(f"{section}.path", path, layout, longest)
