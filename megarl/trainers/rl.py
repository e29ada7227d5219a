"""Reinforcement learning: generate → score → prepare → update → sync → record.

PPO arXiv:1707.06347, GRPO arXiv:2402.03300; docs/algorithms.md says what else there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megarl.algorithms.advantages import Advantages, advantage_estimator
from megarl.algorithms.aggregate import Denominators, row_weights
from megarl.data.sample import Prompt, Sample
from megarl.models.train import StepResult
from megarl.trainers import rl_metrics
from megarl.trainers.collect import BASELINE, reward_named
from megarl.trainers.critic import WEIGHTS_OF_VALUES, add_values, update_critic
from megarl.trainers.exchange import SampleTable, Share, TrainingSample, assign, move, share_numbers
from megarl.trainers.minibatch import MiniBatch, Row, at_predicting_positions, make_mini_batch, packed_again
from megarl.trainers.policy import ADVANTAGES, MASK, OLD, REFERENCE, ROLLOUT, WEIGHTS, add_logprobs, update_policy
from megarl.trainers.prepare import (
    TokenAdvantages,
    add_advantages,
    add_selection,
    apply_correction,
    row_advantages,
)
from megarl.trainers.rl_parts import RLParts
from megarl.trainers.sync import sync_weights
from megarl.trainers.update_watch import UpdateWatch
from megarl.weights.bucket_stream import Traffic


class RLTrainer:
    """The loop of one rank. Every rank runs the same steps, and they meet in collectives only."""

    def __init__(self, parts: RLParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.groups = parts.groups
        self.watch = UpdateWatch(parts.guards, parts.groups)

    def train_step(self, step: int, prompts: Sequence[Prompt]) -> dict[str, float]:
        """One step on a global batch of prompts, which is the same list on every rank; gives its metrics."""
        timers, parts = self.parts.timers, self.parts
        with timers("step"):
            with timers("gen"):
                collected = parts.collector.collect(step, prompts)
                if parts.generator.engine is not None:
                    parts.generator.engine.sleep()
            with timers("exchange"):
                table = self.share(collected.samples, collected.groups)
                by_row = row_advantages(self.config, table) if parts.needs.row_advantages else None
                batches = self.mini_batches(collected.samples, table, by_row)
                value_batches = self.value_batches(batches)
            with timers("old_log_prob"):
                self.add_old_logprobs(batches)
            with timers("ref"):
                self.add_reference_logprobs(batches)
            with timers("values"):
                self.add_values(value_batches)
            with timers("adv"):
                by_token = self.prepare(table, batches, value_batches)
            self.watch.begin_step(rl_metrics.table_metrics(parts, table))
            with timers("update_critic"):
                critic_results = self.update_critic(value_batches)
            with timers("update_actor"):
                results = self.update_actor(batches) if step > self.config.trainer.critic_warmup else []
            with timers("sync"):
                traffic = self.sync(changed=bool(results))
        times = timers.flush()
        outcome = rl_metrics.StepOutcome(
            table=table,
            batches=batches,
            by_row=by_row,
            by_token=by_token,
            results=results,
            critic_results=critic_results,
            traffic=traffic,
        )
        metrics = rl_metrics.step_metrics(parts, outcome)
        if parts.kl_controller is not None:
            parts.kl_controller.update(metrics["critic/kl"], table.size)
        return {
            **metrics,
            **collected.metrics,
            **rl_metrics.reward_metrics(collected.samples),
            **rl_metrics.performance_metrics(parts, outcome, times["timing_s/step"]),
            **times,
        }

    def share(self, samples: list[Sample], groups: int) -> SampleTable:
        """The numbers of all samples, on every rank."""
        algorithm = self.config.algorithm
        estimator = advantage_estimator.traits(algorithm.adv_estimator)
        names = [BASELINE] if estimator.needs_baseline else []
        if estimator.needs_rewards_by_name:
            names += algorithm.gdpo_reward_keys
        part = lambda sample, name: reward_named(sample, name, "algorithm.gdpo_reward_keys")
        return share_numbers(samples, groups, self.config.rollout.n, part, names)

    def mini_batches(self, samples: list[Sample], table: SampleTable, by_row: Advantages | None) -> list[MiniBatch]:
        """The step's mini-batches as this rank trains on them: consecutive prompts, shared out by estimated work."""
        size = self.config.actor.ppo_mini_batch_size * self.config.rollout.n
        wholes = [range(start, min(start + size, table.size)) for start in range(0, table.size, size)]
        places = [self._trained(whole, by_row) for whole in wholes]
        assigned = [assign(table, batch, self.groups.layout.dp, self.parts.shape) for batch in places]
        everything = [
            [place for batch in assigned for place in batch[rank].places] for rank in range(self.groups.layout.dp)
        ]
        held = move(samples, table, everything, self.groups, self.parts.routed)
        mine = self.groups.dp.rank()
        return [
            self._mini_batch([held[place] for place in batch[mine].places], batch, whole, table, by_row)
            for batch, whole in zip(assigned, wholes, strict=True)
        ]

    def _trained(self, places: range, by_row: Advantages | None) -> list[int]:
        """Those of a mini-batch's places that can move the weights (`actor.skip_zero_advantage`)."""
        if by_row is None or not self.parts.needs.skips_zero_advantage:
            return list(places)
        return [place for place in places if by_row.advantages[place] != 0]

    def _mini_batch(
        self,
        samples: list[TrainingSample],
        shares: list[Share],
        whole: range,
        table: SampleTable,
        by_row: Advantages | None,
    ) -> MiniBatch:
        """Args:
        samples: this data-parallel rank's part of the mini-batch.
        shares: those of all data-parallel ranks.
        whole: places of the mini-batch, those that are left out included: what the loss is divided by.
        """
        actor = self.config.actor
        lengths = torch.from_numpy(table.response_tokens)
        # Every rank knows all lengths, so nothing is left to reduce.
        denominators = Denominators.of(lengths[whole.start : whole.stop])
        weigh = lambda mode: row_weights(
            mode,
            lengths,
            denominators,
            loss_scale_factor=actor.loss_scale_factor or self.config.data.max_response_length,
        )
        numbers = {WEIGHTS: weigh(actor.aggregation)}
        if by_row is not None:
            numbers[ADVANTAGES] = by_row.advantages.squeeze(1)
        if self.parts.critic is not None:
            numbers[WEIGHTS_OF_VALUES] = weigh(self.config.critic.loss_agg_mode)
        return make_mini_batch(
            [
                _row(sample, {name: column[sample.place] for name, column in numbers.items()}, self.parts.mixtures)
                for sample in samples
            ],
            (MASK, ROLLOUT, *numbers),
            self.groups,
            max_tokens=actor.max_tokens_per_micro_batch,
            work=[share.work for share in shares],
            places=[sample.place for sample in samples],
        )

    def value_batches(self, batches: list[MiniBatch]) -> list[MiniBatch]:
        """The same samples as the critic packs them; none without a critic."""
        if self.parts.critic is None:
            return []
        limit = self.config.critic.max_tokens_per_micro_batch or self.config.actor.max_tokens_per_micro_batch
        return [packed_again(batch, self.groups, max_tokens=limit) for batch in batches]

    def add_old_logprobs(self, batches: list[MiniBatch]) -> None:
        """Log-probs before the update, unless nothing needs them before it: then they are those of its own pass."""
        if len(batches) * self.config.actor.ppo_epochs > 1 or self.parts.needs.old_logprobs:
            for batch in batches:
                add_logprobs(
                    self.parts.actor.model,
                    batch,
                    OLD,
                    self.config.rollout.temperature,
                    replay_mode=self.config.actor.router_replay.mode,
                )

    def add_reference_logprobs(self, batches: list[MiniBatch]) -> None:
        """Log-probs of the reference model, where there is one."""
        if self.parts.reference is not None:
            for batch in batches:
                add_logprobs(self.parts.reference, batch, REFERENCE, self.config.rollout.temperature)

    def add_values(self, batches: list[MiniBatch]) -> None:
        """The critic's values before the update, where there is one."""
        for batch in batches:
            add_values(self.parts.critic, batch)

    def prepare(
        self, table: SampleTable, batches: list[MiniBatch], value_batches: list[MiniBatch]
    ) -> TokenAdvantages | None:
        """Advantages of tokens, and corrections, on the last stage: what has to wait for the passes."""
        needs, by_token = self.parts.needs, None
        if not self.groups.is_last_stage:
            return None
        if not needs.row_advantages:
            controller = self.parts.kl_controller
            by_token = add_advantages(self.config, table, batches, value_batches, self.groups, controller)
        for number, batch in enumerate(batches):
            if needs.correction:
                apply_correction(self.config, self.parts.correction, batch, self.groups)
            if needs.selection:
                add_selection(self.config, batch, self.groups, self.parts.optimizer_steps + number)
        return by_token

    def update_critic(self, batches: list[MiniBatch]) -> list[StepResult]:
        """One optimizer step of the critic for each mini-batch and epoch, where there is one."""
        critic = self.parts.critic
        results = []
        for _ in range(self.config.critic.ppo_epochs):
            for batch in batches:
                self.parts.critic_schedule.step(1)
                veto = self.watch.veto("critic/grad_norm", partial(rl_metrics.add_update_of_critic, self.parts))
                results.append(update_critic(critic, batch, self.config.critic, veto=veto))
        return results

    def update_actor(self, batches: list[MiniBatch]) -> list[StepResult]:
        """One optimizer step for each mini-batch and epoch."""
        results = []
        for _ in range(self.config.actor.ppo_epochs):
            for batch in batches:
                self.parts.schedule.step(1)
                veto = self.watch.veto("actor/grad_norm", partial(rl_metrics.add_update_of_actor, self.parts, batch))
                temperature = self.config.rollout.temperature
                results.append(update_policy(self.parts.actor, batch, self.config.actor, temperature, veto=veto))
        self.parts.optimizer_steps += len(results)
        return results

    def sync(self, *, changed: bool = True) -> Traffic | None:
        """The new weights to this rank's engine, where there is one; returns what this rank moved.

        Args:
            changed: whether there are new ones; an engine that slept needs weights in any case.
        """
        engine = self.parts.generator.engine
        if engine is None or not (changed or engine.is_asleep):
            return None
        parts, check = self.parts, self.config.rollout.check_weight_sync
        return engine.sync(lambda awake: sync_weights(parts.weights, awake, parts.optimizer_steps, check=check))


def _row(sample: TrainingSample, numbers: dict[str, torch.Tensor], mixtures: list[int]) -> Row:
    """A sample with its per-token columns.

    Args:
        numbers: the same for each of its tokens.
        mixtures: those of this rank, of which experts are replayed.
    """
    mask = sample.response_mask
    columns = {MASK: mask, ROLLOUT: sample.rollout_logprobs}
    columns |= {name: mask * number for name, number in numbers.items()}
    return Row(
        token_ids=sample.token_ids,
        first_target=sample.prompt_length,
        columns={name: at_predicting_positions(column, sample.prompt_length) for name, column in columns.items()},
        routed_experts=None if sample.routed_experts is None else sample.routed_experts[:, mixtures],
    )
