"""What generates and scores in a run, built from its config."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megarl import platform
from megarl.config import RunConfig
from megarl.data.chat import ChatTokenizer
from megarl.parallel.groups import Groups
from megarl.rewards.manager import RewardManager, RewardSource
from megarl.rollout.server_engine import make_server_engine
from megarl.rollout.sglang.options import engine_settings
from megarl.rollout.sglang_engine import make_sglang_engine
from megarl.rollout.transformers_engine import TransformersEngine
from megarl.trainers.engine_keeper import EngineKeeper
from megarl.trainers.generation import Generator, Sampling
from megarl.trainers.judge import Judge


def build_graders(config: RunConfig, sources: Iterable[tuple[str, str | None]]) -> RewardManager | None:
    """The graders' processes; None where the reward model alone scores.

    Args:
        sources: (`data_source`, `reward_model.style`) of the rows that they are to score.
    """
    if config.reward.rule_weight is None:
        return None
    return RewardManager(config.reward, {RewardSource(*source) for source in sources})


def build_generator(
    config: RunConfig, groups: Groups, chat: ChatTokenizer, graders: RewardManager | None, *, generates: bool
) -> Generator:
    """The generator of this rank. Collective over the world where there is a reward model.

    Args:
        generates: whether an engine is needed; it has no weights yet.
    """
    return Generator(
        _make_engine(config, groups) if generates else None,
        graders,
        chat,
        seed=config.trainer.seed,
        judge=Judge(config, groups) if config.reward.model.path else None,
        rule_weight=config.reward.rule_weight or 0.0,
        judge_weight=config.reward.model.weight,
    )


def training_sampling(config: RunConfig) -> Sampling:
    """How responses are drawn to be trained on."""
    rollout = config.rollout
    return Sampling(
        n=rollout.n,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=config.data.max_response_length,
    )


def evaluation_sampling(config: RunConfig) -> Sampling:
    """How responses are drawn in evaluation."""
    val = config.rollout.val_kwargs
    return Sampling(
        n=val.n,
        temperature=val.temperature,
        top_p=val.top_p,
        top_k=val.top_k,
        max_new_tokens=config.data.max_response_length,
    )


def _make_engine(config: RunConfig, groups: Groups) -> EngineKeeper:
    rollout = config.rollout
    if rollout.engine != "sglang":
        return EngineKeeper(
            TransformersEngine(
                Path(config.model.path),
                dtype=platform.parse_dtype(config.model.dtype),
                max_num_seqs=rollout.max_num_seqs,
                return_routed_experts=config.actor.router_replay.mode == "R3",
            )
        )
    settings = engine_settings(config)
    if rollout.servers:
        return EngineKeeper(
            make_server_engine(
                settings,
                groups.rank,
                rollout.servers,
                tensor_parallel_size=rollout.tensor_model_parallel_size,
                limit_s=rollout.server_timeout_s,
            )
        )
    engine = make_sglang_engine(settings, groups.rank, rollout.tensor_model_parallel_size)
    return EngineKeeper(engine, sleeps=rollout.free_cache_engine, max_restarts=rollout.max_engine_restarts)
