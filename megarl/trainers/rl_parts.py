"""Everything that an RL run holds on one rank, built from its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import platform
from megarl.algorithms.advantages import EstimatorTraits, advantage_estimator
from megarl.algorithms.kl_reward import AdaptiveKL, FixedKL, KLController
from megarl.algorithms.policy_loss import policy_loss
from megarl.algorithms.rollout_correction import RolloutCorrectionOptions
from megarl.checkpoint.training import SavedModel
from megarl.config import ConfigError, ModelShape, RunConfig
from megarl.config.guard_rules import guard_rules
from megarl.data.chat import ChatTokenizer, load_chat_tokenizer
from megarl.data.prompts import PromptDataset
from megarl.data.responses import OfflineResponses
from megarl.data.sampler import PromptSampler
from megarl.models.build import MegatronModel, Role
from megarl.models.router_replay import mixtures_of_rank
from megarl.models.train import TrainableModel, learning_rate_schedule
from megarl.observe import MetricSums, ModelFlops, Timers, measure_peak_tflops
from megarl.observe.guards import Guards
from megarl.parallel.groups import Groups
from megarl.trainers.collect import Collector
from megarl.trainers.generation import Generator, Sampling
from megarl.trainers.generation_setup import (
    build_generator,
    build_graders,
    evaluation_sampling,
    training_sampling,
)
from megarl.trainers.prepare import correction_options
from megarl.trainers.rl_metrics import KINDS
from megarl.trainers.routed_experts import RoutedShape
from megarl.trainers.setup import check_same_tokens, load_model, load_plugins_of, make_trainable
from megarl.trainers.state import Stateful
from megarl.trainers.sync import plan_sync
from megarl.weights.bucket_stream import BucketStream


@dataclass(kw_only=True, slots=True)
class RLParts:
    """What the loop works with. `build_rl_parts` makes it."""

    config: RunConfig
    groups: Groups
    shape: ModelShape
    chat: ChatTokenizer
    train_data: PromptDataset
    val_data: PromptDataset | None
    sampler: PromptSampler
    actor: TrainableModel
    critic: TrainableModel | None
    """Where the advantage estimator needs values."""
    reference: MegatronModel | None
    """Where a KL divergence is taken against it."""
    schedule: Any
    """Megatron-Core's learning-rate scheduler."""
    critic_schedule: Any
    """The critic's."""
    kl_controller: KLController | None
    """Where the reward is lowered by a KL penalty."""
    guards: Guards
    correction: RolloutCorrectionOptions
    needs: StepNeeds
    routed: RoutedShape | None
    """Where experts that the engine chose are replayed."""
    mixtures: list[int]
    """Of the actor, those of this rank."""
    weights: BucketStream
    """Of the actor, to the engines."""
    generator: Generator
    collector: Collector
    sampling: Sampling
    val_sampling: Sampling
    timers: Timers
    metrics: MetricSums
    flops: ModelFlops
    peak_tflops: float
    total_steps: int
    optimizer_steps: int = 0
    """That the weights have seen: the weight version."""

    @property
    def trainable(self) -> TrainableModel:
        """What checkpoints cover."""
        return self.actor

    @property
    def further_models(self) -> dict[str, SavedModel]:
        """What checkpoints cover beside it."""
        if self.critic is None:
            return {}
        source = self.config.critic.path or self.config.model.path
        return {"critic": SavedModel(trainable=self.critic, source_hf=source)}

    @property
    def others(self) -> dict[str, Stateful]:
        """What else goes on where it was when a run is resumed."""
        found: dict[str, Stateful | None] = {
            "critic_schedule": self.critic_schedule,
            "kl_controller": self.kl_controller,
            "guards": self.guards,
            "collector": self.collector if self.collector.has_state else None,
        }
        return {name: other for name, other in found.items() if other is not None}

    def close(self) -> None:
        """Ends the worker processes."""
        self.generator.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNeeds:
    """What a step has to do, as the config's names decide."""

    row_advantages: bool
    """Advantages come from the scores of samples alone, and are known before any pass."""
    skips_zero_advantage: bool
    """Samples whose advantage is 0 are left out of the update."""
    old_logprobs: bool
    """Log-probs before the update are needed before it."""
    reference: bool
    critic: bool
    correction: bool
    """Tokens are weighted or rejected by how far engine and trainer are apart."""
    selection: bool
    """The policy loss treats some tokens of the mini-batch apart."""

    @classmethod
    def of(cls, config: RunConfig) -> StepNeeds:
        """Those of a config.

        Raises:
            ConfigError: a name that nobody registered, or an estimator that this run cannot give what it needs.
        """
        algorithm, actor = config.algorithm, config.actor
        try:
            estimator = advantage_estimator.traits(algorithm.adv_estimator)
            loss = policy_loss.traits(actor.policy_loss)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        _check_estimator(config, estimator)
        correction = algorithm.rollout_correction
        corrects = correction.rollout_is != "none" or correction.rollout_rs != "none"
        row_advantages = estimator.row_level and not algorithm.use_kl_in_reward
        # What else moves the weights, or looks at the tokens of all samples.
        model = config.model
        routers = model.moe_aux_loss_coeff or model.moe_z_loss_coeff or model.moe_router_bias_update_rate
        whole = actor.use_kl_loss or actor.entropy_coeff or loss.needs_selection or routers
        return cls(
            row_advantages=row_advantages,
            skips_zero_advantage=row_advantages and actor.skip_zero_advantage and not whole and not corrects,
            old_logprobs=algorithm.use_kl_in_reward or corrects or loss.needs_selection,
            reference=actor.use_kl_loss or algorithm.use_kl_in_reward,
            critic=estimator.needs_values,
            correction=corrects,
            selection=loss.needs_selection,
        )


def _check_estimator(config: RunConfig, estimator: EstimatorTraits) -> None:
    """Whether the run has what the estimator needs, which the config alone does not tell of one that a file brings."""
    algorithm, rollout = config.algorithm, config.rollout
    where = f"algorithm.adv_estimator {algorithm.adv_estimator}"
    if estimator.needs_groups and rollout.n < 2:
        raise ConfigError(
            f"{where} compares the samples of a prompt, but rollout.n is {rollout.n}: set it to 2 or more."
        )
    if estimator.needs_baseline and (rollout.replay_dir or rollout.engine == "dataset"):
        given = "rollout.replay_dir" if rollout.replay_dir else "rollout.engine dataset"
        raise ConfigError(f"{where} needs a greedy response to each prompt, but with {given} nothing is generated.")
    if estimator.needs_rewards_by_name and not algorithm.gdpo_reward_keys:
        raise ConfigError(
            f"{where} works on several rewards, but algorithm.gdpo_reward_keys is empty: name some numbers that the "
            "reward function returns."
        )


def build_rl_parts(config: RunConfig, groups: Groups) -> RLParts:
    """Loads data and models and starts engine and graders. Collective over the world.

    Cheap checks come first: data, tokenizer and reward function are looked at before a model is loaded.

    Raises:
        ConfigError: anything that a person has to put right.
    """
    load_plugins_of(config)
    needs = StepNeeds.of(config)
    chat = load_chat_tokenizer(config.model.path)
    offline = OfflineResponses(config, chat) if config.rollout.engine == "dataset" else None
    train_data = offline or PromptDataset(config.data.train_files, chat, config.data)
    val_data = PromptDataset(config.data.val_files, chat, config.data) if config.data.val_files else None
    seed = config.trainer.seed
    data_seed = config.data.seed if config.data.seed is not None else seed
    sampler = PromptSampler(
        len(train_data),
        config.data.train_batch_size,
        shuffle=config.data.shuffle,
        seed=data_seed,
        fingerprint=train_data.fingerprint,
    )
    datasets = [data for data in (train_data, val_data) if data is not None]
    rewards = build_graders(config, {source for data in datasets for source in data.sources})
    try:
        total_steps = planned_steps(config, sampler)
        mini_batches = config.data.train_batch_size // config.actor.ppo_mini_batch_size
        actor = make_trainable(load_model(config, groups), config)
        if needs.critic and config.trainer.critic_warmup >= total_steps:
            raise ConfigError(
                f"trainer.critic_warmup is {config.trainer.critic_warmup} of the run's {total_steps} steps, so the "
                "actor would never learn: shorten it."
            )
        critic = _critic(config, groups, chat) if needs.critic else None
        sampling = training_sampling(config)
        generates = config.rollout.replay_dir is None and offline is None
        generator = build_generator(config, groups, chat, rewards, generates=generates or val_data is not None)
        shape = ModelShape.from_hf(config.model.path)
        schedule_of = lambda model, optim, epochs: learning_rate_schedule(
            model.optimizer, optim, total_steps * mini_batches * epochs, updates_per_step=mini_batches * epochs
        )
        return RLParts(
            config=config,
            groups=groups,
            shape=shape,
            chat=chat,
            train_data=train_data,
            val_data=val_data,
            sampler=sampler,
            actor=actor,
            critic=critic,
            reference=load_model(config, groups) if needs.reference else None,
            schedule=schedule_of(actor, config.optim, config.actor.ppo_epochs),
            critic_schedule=critic and schedule_of(critic, config.critic.optim, config.critic.ppo_epochs),
            kl_controller=_kl_controller(config),
            guards=Guards(guard_rules(config), config.guard),
            correction=correction_options(config.algorithm.rollout_correction),
            needs=needs,
            routed=RoutedShape.of(config, shape),
            mixtures=mixtures_of_rank(actor.model),
            weights=plan_sync(actor.model, config.rollout),
            generator=generator,
            collector=Collector(
                config,
                groups,
                generator,
                sampling,
                lambda: train_data.prompts(sampler.next_batch()),
                offline,
                RoutedShape.of(config, shape),
            ),
            sampling=sampling,
            val_sampling=evaluation_sampling(config),
            timers=Timers(),
            metrics=MetricSums(KINDS, platform.current().device),
            flops=ModelFlops(shape=shape),
            peak_tflops=config.observe.peak_tflops or measure_peak_tflops(actor.model.dtype),
            total_steps=total_steps,
        )
    except BaseException:
        if rewards is not None:
            rewards.close()
        raise


def _critic(config: RunConfig, groups: Groups, chat: ChatTokenizer) -> TrainableModel:
    path = config.critic.path
    if path is not None:
        _check_critic_tokens(path, config.model.path, chat)
    model = load_model(config, groups, role=Role.CRITIC, path=config.critic.path)
    return make_trainable(model, config, config.critic.optim)


def _check_critic_tokens(critic: str, actor: str, chat: ChatTokenizer) -> None:
    """A critic reads the actor's token ids. One without a tokenizer has at least to know as many."""
    if Path(critic, "tokenizer_config.json").exists():
        check_same_tokens(critic, "critic.path", chat, template=False)
        return
    found, wanted = (ModelShape.from_hf(path).vocab_size for path in (critic, actor))
    if found != wanted:
        raise ConfigError(
            f"critic.path {critic} has a vocabulary of {found} tokens, but model.path {actor} has {wanted}: a critic "
            "reads the actor's token ids, so take one that was made from the same model."
        )


def _kl_controller(config: RunConfig) -> KLController | None:
    control = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward:
        return None
    if control.type == "fixed":
        return FixedKL(beta=control.kl_coef)
    return AdaptiveKL(beta=control.kl_coef, target=control.target_kl, horizon=control.horizon)


def planned_steps(config: RunConfig, sampler: PromptSampler) -> int:
    """Steps of the whole run: `trainer.total_training_steps`, or what the epochs give."""
    by_epochs = sampler.num_batches(config.trainer.total_epochs)
    limit = config.trainer.total_training_steps
    return by_epochs if limit is None else limit
