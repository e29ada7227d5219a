"""The samples of a step: generated, scored and chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.advantages import advantage_estimator
from megarl.algorithms.filters import ResamplingBuffer, informative, overlong_penalty
from megarl.config import ConfigError, RunConfig
from megarl.data.responses import OfflineResponses
from megarl.data.sample import Prompt, Sample, sample_from_json, sample_to_json
from megarl.parallel.groups import Groups
from megarl.rewards.outcome import SCORE
from megarl.trainers.dump import RolloutDump, RolloutReplay
from megarl.trainers.generation import Generator, Sampling, share_of
from megarl.trainers.routed_experts import RoutedShape

BASELINE, OVERLONG = "baseline", "overlong"
"""Names of rewards beside `score`: that of ReMax's greedy response, and the penalty for length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """This rank's samples of a step."""

    samples: list[Sample]
    """Ordered by group and index; groups are numbered from 0 over all ranks."""
    groups: int
    """Over all ranks."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The same on every rank."""


class Collector:
    """Makes the samples of each step on this rank."""

    def __init__(
        self,
        config: RunConfig,
        groups: Groups,
        generator: Generator,
        sampling: Sampling,
        draw_prompts: Callable[[], list[Prompt]],
        offline: OfflineResponses | None = None,
        routed: RoutedShape | None = None,
    ) -> None:
        """Args:
        draw_prompts: the next batch of prompts, the same list on every rank; dynamic sampling asks for more.
        routed: of the experts that samples have to bring along; None: none.
        """
        self._config = config
        self._groups = groups
        self._generator = generator
        self._sampling = sampling
        self._draw_prompts = draw_prompts
        folder = config.trainer.rollout_data_dir
        self._dump = RolloutDump(folder, groups.rank, groups.layout.world_size) if folder else None
        rollout = config.rollout
        self._replay = RolloutReplay(rollout.replay_dir, rollout.n) if rollout.replay_dir else None
        self._offline = offline
        self._routed = routed
        self.buffer = _buffer(config)

    @property
    def has_state(self) -> bool:
        """Whether steps depend on earlier ones."""
        return self.buffer is not None

    def state_dict(self) -> dict[str, Any]:
        """The buffer of PF-PPO as JSON, the same on every rank."""
        assert self.buffer is not None
        state = self.buffer.state_dict()
        items = [sample_to_json(sample) for sample in state["items"]]
        return {**state, "items": items, "generator": state["generator"].tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        assert self.buffer is not None
        items = [sample_from_json(item) for item in state["items"]]
        self.buffer.load_state_dict(
            {**state, "items": items, "generator": torch.tensor(state["generator"], dtype=torch.uint8)}
        )

    @property
    def generates(self) -> bool:
        """Whether the engine is used in training; a replay needs none."""
        return self._replay is None and self._offline is None

    def collect(self, step: int, prompts: Sequence[Prompt]) -> Collected:
        """The step's samples. Collective over the world.

        Args:
            prompts: of the step, over all ranks.
        """
        if self._config.algorithm.filter_groups.enable:
            collected = self._informative_groups(step, prompts)
        else:
            collected = Collected(samples=self._batch(step, prompts, 0), groups=len(prompts))
        if self._routed is not None:
            source = f"rollout.engine {self._config.rollout.engine}" if self.generates else "rollout.replay_dir"
            self._routed.check(collected.samples, source)
        if self._dump is not None:
            self._dump.write(step, collected.samples)
        return collected if self.buffer is None else self._resampled(collected, self.buffer)

    def _batch(self, step: int, prompts: Sequence[Prompt], first_group: int) -> list[Sample]:
        """This rank's share of the samples of a batch of prompts, scored; groups count from `first_group`."""
        engine = self._generator.engine if self.generates else None
        engine_size = 1 if engine is None else engine.size
        share = share_of(len(prompts), self._groups.layout.world_size, self._groups.rank, engine_size)
        if self._replay is not None:
            return self._replay.read(step, share)
        mine = [(first_group + place, prompts[place]) for place in share]
        if self._offline is not None:
            samples = self._offline.samples(mine, step)
            return samples if self._offline.has_rewards else self._shape(self._generator.score(samples))
        samples = self._shape(self._generator.run(mine, self._sampling, draw=step))
        if advantage_estimator.traits(self._config.algorithm.adv_estimator).needs_baseline:
            greedy = dataclasses.replace(self._sampling, n=1, temperature=0.0)
            answers = self._shape(self._generator.run(mine, greedy, draw=step))
            baselines = {sample.group: sample.rewards[SCORE] for sample in answers}
            for sample in samples:
                sample.rewards[BASELINE] = baselines[sample.group]
        return samples

    def _shape(self, samples: list[Sample]) -> list[Sample]:
        """Takes the penalty for length off the scores."""
        shaping, limit = self._config.reward.overlong_buffer, self._config.data.max_response_length
        if shaping.enable:
            lengths = torch.tensor([len(sample.response_ids) for sample in samples])
            penalties = overlong_penalty(lengths, limit, shaping.len, shaping.penalty_factor).tolist()
            for sample, penalty in zip(samples, penalties, strict=True):
                sample.rewards[OVERLONG] = penalty
                sample.rewards[SCORE] += penalty
        return samples

    def _informative_groups(self, step: int, prompts: Sequence[Prompt]) -> Collected:
        """Dynamic sampling: batches of prompts until enough groups have samples of different worth.

        Collective over the world. Groups are taken in the order of their prompts, so that the layout does not decide
        which.
        """
        settings, wanted = self._config.algorithm.filter_groups, len(prompts)
        kept: list[Sample] = []
        found: list[int] = []
        batches = 0
        while len(found) < wanted and batches < settings.max_num_gen_batches:
            batch = prompts if batches == 0 else self._draw_prompts()
            samples = self._batch(step, batch, batches * wanted)
            metric = torch.tensor([reward_named(sample, settings.metric, _METRIC_KEY) for sample in samples])
            passes = informative(metric, torch.tensor([sample.group for sample in samples], dtype=torch.int64))
            kept += [sample for sample, is_kept in zip(samples, passes.tolist(), strict=True) if is_kept]
            found = _everyones({sample.group for sample in kept})
            batches += 1
        if not found or (len(found) < wanted and settings.on_exhausted == "error"):
            or_less = ", or set algorithm.filter_groups.on_exhausted to smaller_batch" if found else ""
            raise ConfigError(
                f"algorithm.filter_groups: step {step} found {len(found)} of {wanted} prompts whose samples differ in "
                f"{settings.metric} after {batches} batches: the task is too easy or too hard for this model. Raise "
                f"rollout.n or algorithm.filter_groups.max_num_gen_batches, choose other prompts{or_less}."
            )
        number = {group: place for place, group in enumerate(found[:wanted])}
        samples = [dataclasses.replace(s, group=number[s.group]) for s in kept if s.group in number]
        metrics = {"group/gen_batches": float(batches), "group/kept_fraction": len(found) / (batches * wanted)}
        return Collected(samples=samples, groups=len(number), metrics=metrics)

    def _resampled(self, collected: Collected, buffer: ResamplingBuffer[Sample]) -> Collected:
        """PF-PPO: as many samples, drawn by weight. Collective over the world.

        Every rank has the whole buffer and draws the same from it; each keeps its share of what is drawn.
        """
        everyones: list[list[Sample]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyones, collected.samples)
        samples = sorted((s for part in everyones for s in part), key=lambda sample: (sample.group, sample.index))
        buffer.add(samples, [sample.rewards[SCORE] for sample in samples])
        n, drawn = self._config.rollout.n, buffer.draw(len(samples))
        mine = share_of(collected.groups, self._groups.layout.world_size, self._groups.rank)
        return Collected(
            samples=[
                dataclasses.replace(drawn[group * n + index], group=group, index=index)
                for group in mine
                for index in range(n)
            ],
            groups=collected.groups,
            metrics={"pf_ppo/distinct_fraction": len({id(sample) for sample in drawn}) / len(drawn)},
        )


_METRIC_KEY = "algorithm.filter_groups.metric"


def reward_named(sample: Sample, name: str, key: str) -> float:
    """A number that the reward function returned.

    Args:
        key: of the config that names it.

    Raises:
        ConfigError: the sample has no such number. One whose scoring failed has `score` for all of them.
    """
    if name in sample.rewards:
        value = sample.rewards[name]
        if not math.isfinite(value):
            raise ConfigError(
                f"{key} is {name}, which the reward function returned as {value} for row {sample.prompt.row}: it must "
                "be a finite number."
            )
        return value
    if sample.reward_failure is not None:
        return sample.rewards[SCORE]
    raise ConfigError(
        f"{key} is {name}, but the reward function returned no such number for row {sample.prompt.row}; it returned "
        f"{', '.join(sample.rewards)}."
    )


def _everyones(groups: set[int]) -> list[int]:
    """Groups of all ranks, in order. Collective over the world."""
    parts: list[set[int]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, groups)
    return sorted(set().union(*parts))


def _buffer(config: RunConfig) -> ResamplingBuffer[Sample] | None:
    settings = config.algorithm.pf_ppo
    if not settings.enable:
        return None
    size = settings.buffer_size or config.data.train_batch_size * config.rollout.n
    return ResamplingBuffer(size, settings.reweight_method, settings.weight_pow, config.trainer.seed)
