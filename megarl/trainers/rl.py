"""Reinforcement learning: generate → score → prepare → update → sync → record (GRPO, arXiv:2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algorithms.advantages import AdvantageInputs, AdvantageOptions, Advantages, advantage_estimator
from megarl.algorithms.aggregate import Denominators, row_weights
from megarl.data.sample import Prompt, Sample
from megarl.models.train import StepResult
from megarl.trainers import rl_metrics
from megarl.trainers.exchange import SampleTable, Share, TrainingSample, assign, move, share_numbers
from megarl.trainers.generation import share_of
from megarl.trainers.minibatch import MiniBatch, Row, at_predicting_positions, make_mini_batch
from megarl.trainers.policy import COLUMNS, OLD, REFERENCE, add_logprobs, update_policy
from megarl.trainers.rl_parts import RLParts
from megarl.trainers.sync import sync_weights


class RLTrainer:
    """The loop of one rank. Every rank runs the same steps, and they meet in collectives only."""

    def __init__(self, parts: RLParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.groups = parts.groups

    def train_step(self, step: int, prompts: Sequence[Prompt]) -> dict[str, float]:
        """One step on a global batch of prompts, which is the same list on every rank; gives its metrics."""
        timers = self.parts.timers
        with timers("step"):
            with timers("gen"):
                samples = self.generate(step, prompts)
            with timers("adv"):
                table = share_numbers(samples, len(prompts), self.config.rollout.n)
                advantages = self.advantages(table)
                mini_batches = self.mini_batches(samples, table, advantages)
            with timers("old_log_prob"):
                self.add_old_logprobs(mini_batches)
            with timers("ref"):
                self.add_reference_logprobs(mini_batches)
            with timers("update_actor"):
                results = self.update(mini_batches)
            with timers("sync"):
                synced_bytes = self.sync()
        times = timers.flush()
        return {
            **rl_metrics.step_metrics(self.parts, table, advantages, mini_batches, results, synced_bytes),
            **rl_metrics.reward_metrics(samples),
            **rl_metrics.performance_metrics(self.parts, table, mini_batches, times["timing_s/step"]),
            **times,
        }

    def generate(self, step: int, prompts: Sequence[Prompt]) -> list[Sample]:
        """This rank's share of the samples, scored: generated, or read back from a dump."""
        share = share_of(len(prompts), self.groups.layout.world_size, self.groups.rank)
        if self.parts.replay is not None:
            samples = self.parts.replay.read(step, share)
        else:
            mine = [(group, prompts[group]) for group in share]
            samples = self.parts.generator.run(mine, self.parts.sampling, draw=step)
        if self.parts.dump is not None:
            self.parts.dump.write(step, samples)
        return samples

    def advantages(self, table: SampleTable) -> Advantages:
        """One number for each sample [samples, 1], from the scores of all ranks."""
        estimate = advantage_estimator.get(self.config.algorithm.adv_estimator)
        return estimate(
            AdvantageInputs(
                rewards=torch.from_numpy(table.score).unsqueeze(1),
                mask=torch.from_numpy(table.response_tokens > 0).unsqueeze(1),
                groups=torch.from_numpy(table.group),
            ),
            AdvantageOptions(norm_adv_by_std=self.config.algorithm.norm_adv_by_std),
        )

    def mini_batches(self, samples: list[Sample], table: SampleTable, advantages: Advantages) -> list[MiniBatch]:
        """The step's mini-batches as this rank trains on them: consecutive prompts, shared out by estimated work."""
        size = self.config.actor.ppo_mini_batch_size * self.config.rollout.n
        wholes = [range(start, start + size) for start in range(0, table.size, size)]
        places = [self._trained(whole, advantages) for whole in wholes]
        assigned = [assign(table, batch, self.groups.layout.dp, self.parts.shape) for batch in places]
        everything = [
            [place for batch in assigned for place in batch[rank].places] for rank in range(self.groups.layout.dp)
        ]
        held = move(samples, table, everything, self.groups)
        mine = self.groups.dp.rank()
        return [
            self._mini_batch([held[place] for place in batch[mine].places], batch, whole, table, advantages)
            for batch, whole in zip(assigned, wholes, strict=True)
        ]

    def _trained(self, places: range, advantages: Advantages) -> list[int]:
        """Those of a mini-batch's places that can move the weights (`actor.skip_zero_advantage`)."""
        actor = self.config.actor
        if not actor.skip_zero_advantage or actor.use_kl_loss or actor.entropy_coeff:
            return list(places)
        return [place for place in places if advantages.advantages[place] != 0]

    def _mini_batch(
        self,
        samples: list[TrainingSample],
        shares: list[Share],
        whole: range,
        table: SampleTable,
        advantages: Advantages,
    ) -> MiniBatch:
        """Args:
        samples: this data-parallel rank's part of the mini-batch.
        shares: those of all data-parallel ranks.
        whole: places of the mini-batch, those that are left out included: what the loss is divided by.
        """
        actor = self.config.actor
        lengths = torch.from_numpy(table.response_tokens)
        weights = row_weights(
            actor.loss_agg_mode,
            lengths,
            # Every rank knows all lengths, so nothing is left to reduce.
            Denominators.of(lengths[whole.start : whole.stop]),
            loss_scale_factor=actor.loss_scale_factor or self.config.data.max_response_length,
        )
        rows = [self._row(sample, weights[sample.place], advantages.advantages[sample.place]) for sample in samples]
        return make_mini_batch(
            rows,
            COLUMNS,
            self.groups,
            max_tokens=actor.max_tokens_per_micro_batch,
            work=[share.work for share in shares],
        )

    def _row(self, sample: TrainingSample, weight: torch.Tensor, advantage: torch.Tensor) -> Row:
        mask = sample.response_mask
        columns = {
            "mask": mask,
            "weights": mask * weight,
            "advantages": mask * advantage,
            "rollout_logprobs": sample.rollout_logprobs,
        }
        return Row(
            token_ids=sample.token_ids,
            first_target=sample.prompt_length,
            columns={name: at_predicting_positions(column, sample.prompt_length) for name, column in columns.items()},
        )

    def add_old_logprobs(self, mini_batches: list[MiniBatch]) -> None:
        """Log-probs before the update, unless the step makes one update only: then they are those of its own pass."""
        if len(mini_batches) * self.config.actor.ppo_epochs > 1:
            for mini_batch in mini_batches:
                add_logprobs(self.parts.actor.model, mini_batch, OLD, self.config.rollout.temperature)

    def add_reference_logprobs(self, mini_batches: list[MiniBatch]) -> None:
        """Log-probs of the reference model, where there is one."""
        if self.parts.reference is not None:
            for mini_batch in mini_batches:
                add_logprobs(self.parts.reference, mini_batch, REFERENCE, self.config.rollout.temperature)

    def update(self, mini_batches: list[MiniBatch]) -> list[StepResult]:
        """One optimizer step for each mini-batch and epoch."""
        results = []
        for _ in range(self.config.actor.ppo_epochs):
            for mini_batch in mini_batches:
                self.parts.schedule.step(1)
                results.append(
                    update_policy(self.parts.actor, mini_batch, self.config.actor, self.config.rollout.temperature)
                )
        self.parts.optimizer_steps += len(results)
        return results

    def sync(self) -> int:
        """The new weights to this rank's engine; returns the bytes it received."""
        if self.parts.replay is not None:
            return 0
        return sync_weights(
            self.parts.actor.model,
            self.parts.export_plan,
            self.parts.generator.engine,
            self.parts.optimizer_steps,
            check=self.config.rollout.check_weight_sync,
        )
