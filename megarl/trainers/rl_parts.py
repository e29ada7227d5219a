"""Everything that an RL run holds on one rank, built from its config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import platform
from megarl.config import ConfigError, ModelShape, RunConfig
from megarl.data.chat import ChatTokenizer, load_chat_tokenizer
from megarl.data.prompts import PromptDataset
from megarl.data.sampler import PromptSampler
from megarl.models.build import MegatronModel
from megarl.models.train import TrainableModel, learning_rate_schedule
from megarl.observe import MetricSums, ModelFlops, Timers, measure_peak_tflops
from megarl.parallel.groups import Groups
from megarl.rewards.manager import RewardManager, RewardSource
from megarl.rollout.engine import Engine
from megarl.rollout.transformers_engine import TransformersEngine
from megarl.trainers.dump import RolloutDump, RolloutReplay
from megarl.trainers.generation import Generator, Sampling
from megarl.trainers.rl_metrics import KINDS
from megarl.trainers.setup import load_model, make_trainable
from megarl.weights.export_hf import ExportPlan, plan_export


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
    reference: MegatronModel | None
    """Where `actor.use_kl_loss` is on."""
    schedule: Any
    """Megatron-Core's learning-rate scheduler."""
    export_plan: ExportPlan
    generator: Generator
    sampling: Sampling
    val_sampling: Sampling
    dump: RolloutDump | None
    replay: RolloutReplay | None
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

    def close(self) -> None:
        """Ends the worker processes."""
        self.generator.rewards.close()


def build_rl_parts(config: RunConfig, groups: Groups) -> RLParts:
    """Loads data and models and starts engine and graders. Collective over the world.

    Cheap checks come first: data, tokenizer and reward function are looked at before a model is loaded.

    Raises:
        ConfigError: anything that a person has to put right.
    """
    chat = load_chat_tokenizer(config.model.path)
    train_data = PromptDataset(config.data.train_files, chat, config.data)
    val_data = PromptDataset(config.data.val_files, chat, config.data) if config.data.val_files else None
    seed = config.trainer.seed
    data_seed = config.data.seed if config.data.seed is not None else seed
    sampler = PromptSampler(len(train_data), config.data.train_batch_size, shuffle=config.data.shuffle, seed=data_seed)
    sources = {RewardSource(*source) for data in (train_data, val_data) if data is not None for source in data.sources}
    rewards = RewardManager(config.reward, sources)
    try:
        replay = RolloutReplay(config.rollout.replay_dir) if config.rollout.replay_dir else None
        total_steps = planned_steps(config, sampler)
        actor = make_trainable(load_model(config, groups), config)
        updates = config.data.train_batch_size // config.actor.ppo_mini_batch_size * config.actor.ppo_epochs
        shape = ModelShape.from_hf(config.model.path)
        dump_folder = config.trainer.rollout_data_dir
        return RLParts(
            config=config,
            groups=groups,
            shape=shape,
            chat=chat,
            train_data=train_data,
            val_data=val_data,
            sampler=sampler,
            actor=actor,
            reference=load_model(config, groups) if config.actor.use_kl_loss else None,
            schedule=learning_rate_schedule(actor.optimizer, config.optim, total_steps * updates),
            export_plan=plan_export(actor.model),
            generator=Generator(_make_engine(config), rewards, chat, seed=seed),
            sampling=_sampling(config),
            val_sampling=_val_sampling(config),
            dump=RolloutDump(dump_folder, groups.rank) if dump_folder else None,
            replay=replay,
            timers=Timers(),
            metrics=MetricSums(KINDS, platform.current().device),
            flops=ModelFlops(shape=shape),
            peak_tflops=config.observe.peak_tflops or measure_peak_tflops(actor.model.dtype),
            total_steps=total_steps,
        )
    except BaseException:
        rewards.close()
        raise


def planned_steps(config: RunConfig, sampler: PromptSampler) -> int:
    """Steps of the whole run: `trainer.total_training_steps`, or what the epochs give."""
    by_epochs = sampler.num_batches(config.trainer.total_epochs)
    limit = config.trainer.total_training_steps
    return by_epochs if limit is None else limit


def _make_engine(config: RunConfig) -> Engine:
    if config.rollout.engine != "transformers":
        raise ConfigError(f"rollout.engine {config.rollout.engine} cannot be run by this version; use transformers")
    return TransformersEngine(
        Path(config.model.path),
        dtype=platform.parse_dtype(config.model.dtype),
        max_num_seqs=config.rollout.max_num_seqs,
    )


def _sampling(config: RunConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=config.data.max_response_length,
    )


def _val_sampling(config: RunConfig) -> Sampling:
    val = config.rollout.val_kwargs
    return Sampling(
        n=val.n,
        temperature=val.temperature,
        top_p=val.top_p,
        top_k=val.top_k,
        max_new_tokens=config.data.max_response_length,
    )
