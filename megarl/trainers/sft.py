"""Supervised fine-tuning: the mean negative log-prob of what the assistant wrote, by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config import ModelShape, RunConfig
from megarl.data.chat import load_chat_tokenizer
from megarl.data.packing import PackedBatch
from megarl.data.sampler import PromptSampler
from megarl.data.sft import SftDataset, SftExample
from megarl.models.outputs import token_logprobs
from megarl.models.pipeline import run_pipeline
from megarl.models.train import TrainableModel, learning_rate_schedule
from megarl.observe import MetricSums, ModelFlops, Timers, Tracker, measure_peak_tflops
from megarl.observe.flops import performance
from megarl.observe.reduce import Kind
from megarl.parallel.balance import partition, sequence_flops
from megarl.parallel.groups import Groups
from megarl.trainers.finish import export_final
from megarl.trainers.minibatch import MiniBatch, Row, make_mini_batch
from megarl.trainers.setup import load_model, make_trainable
from megarl.trainers.state import is_due, resume, save

COLUMNS = ("mask",)
"""1 at positions whose next token is learned."""

KINDS: dict[str, Kind] = {"train/loss": "mean", "val/loss": "mean", "batch/padding_fraction": "mean"}


@dataclass(kw_only=True, slots=True)
class SFTParts:
    """What the loop works with."""

    config: RunConfig
    groups: Groups
    shape: ModelShape
    train_data: SftDataset
    val_data: SftDataset | None
    sampler: PromptSampler
    model: TrainableModel
    schedule: Any
    """Megatron-Core's learning-rate scheduler."""
    timers: Timers
    metrics: MetricSums
    total_steps: int
    optimizer_steps: int = 0

    @property
    def trainable(self) -> TrainableModel:
        """What checkpoints cover."""
        return self.model


class SFTTrainer:
    """The loop of one rank."""

    def __init__(self, parts: SFTParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.groups = parts.groups

    def train_step(self, rows: Sequence[int]) -> dict[str, float]:
        """One optimizer step on a global batch of rows, the same numbers on every rank."""
        parts = self.parts
        with parts.timers("step"):
            examples = parts.train_data.examples(rows)
            tokens = sum(sum(example.loss_mask) for example in examples)
            mini_batch = self.pack(examples)
            parts.schedule.step(1)
            result = parts.model.step(mini_batch.batches, self.loss(tokens))
            parts.optimizer_steps += 1
        self._record("train/loss", result.outputs)
        if self._counts_tokens and self.groups.is_first_stage:
            padding = mini_batch.padded_tokens - mini_batch.real_tokens
            parts.metrics.add("batch/padding_fraction", padding, count=mini_batch.padded_tokens)
        return {
            **parts.metrics.reduce(self.groups.world),
            "train/grad_norm": result.grad_norm,
            "train/lr": float(parts.model.optimizer.param_groups[0]["lr"]),
        }

    def evaluate(self) -> dict[str, float]:
        """Loss by token on the held-out rows; none where there are no such."""
        data = self.parts.val_data
        if data is None:
            return {}
        size = self.config.data.train_batch_size
        with self.parts.timers("testing"), torch.no_grad():
            for start in range(0, len(data), size):
                examples = data.examples(range(start, min(start + size, len(data))))
                batches = self.pack(examples).batches
                outputs = run_pipeline(self.parts.model.model, batches, self.loss(1), forward_only=True)
                self._record("val/loss", outputs)
        return self.parts.metrics.reduce(self.groups.world)

    def pack(self, examples: Sequence[SftExample]) -> MiniBatch:
        """This rank's examples of the global batch, shared out by estimated work, in micro-batches."""
        costs = [sequence_flops(len(example.token_ids), self.parts.shape) for example in examples]
        parts = partition(costs, self.groups.layout.dp, equal_counts=False)
        return make_mini_batch(
            [_row(examples[i]) for i in parts[self.groups.dp.rank()]],
            COLUMNS,
            self.groups,
            max_tokens=self.config.actor.max_tokens_per_micro_batch,
            work=[sum(costs[i] for i in part) for part in parts],
        )

    def loss(self, tokens: int) -> Any:
        """The output function of a batch with `tokens` learned tokens over all ranks."""
        model = self.parts.model.model

        def negative_logprob(logits: torch.Tensor, shard: PackedBatch) -> tuple[torch.Tensor, dict[str, Any]]:
            logprobs, _ = token_logprobs(model, logits, shard)
            mask = shard.columns["mask"]
            total = -torch.where(mask > 0, logprobs, 0.0).sum()
            return total / tokens, {"loss": total.detach(), "tokens": mask.sum()}

        return negative_logprob

    @property
    def _counts_tokens(self) -> bool:
        """Whether this rank is the one of its tensor-parallel group that records sums."""
        return self.groups.tp.rank() == 0

    def _record(self, name: str, outputs: Sequence[dict[str, Any]]) -> None:
        if self._counts_tokens:
            for output in outputs:
                self.parts.metrics.add(name, output["loss"], count=output["tokens"])


def _row(example: SftExample) -> Row:
    """A token's mask stands where the token is predicted: one place earlier."""
    mask = torch.tensor([*example.loss_mask[1:], 0], dtype=torch.float32)
    first = next((i for i, learned in enumerate(example.loss_mask) if learned and i), len(example.token_ids))
    return Row(token_ids=torch.tensor(example.token_ids), first_target=first, columns={"mask": mask})


def run_sft(config: RunConfig, groups: Groups) -> None:
    """Runs SFT to its end. Collective over the world.

    Raises:
        ConfigError: anything that a person has to put right.
    """
    parts = _build_parts(config, groups)
    trainer = SFTTrainer(parts)
    settings = config.trainer
    peak = config.observe.peak_tflops or measure_peak_tflops(parts.model.model.dtype)
    flops = ModelFlops(shape=parts.shape)
    start = resume(parts)
    is_main = groups.rank == 0
    with Tracker(
        settings.logger, settings.default_local_dir, is_main, parts.total_steps, "SFT", resume_step=start or None
    ) as tracker:
        tracker.text(f"layout: {groups.layout.describe()}")
        tracker.text(parts.train_data.description())
        if settings.val_before_train and not start:
            tracker.log(0, trainer.evaluate())
        for step in range(start + 1, parts.total_steps + 1):
            rows = parts.sampler.next_batch()
            metrics = trainer.train_step(rows)
            times = parts.timers.flush()
            lengths = parts.train_data.lengths[rows].tolist()
            metrics |= performance(
                flops=flops.update(lengths),
                tokens=sum(lengths),
                seconds=times["timing_s/step"],
                world_size=groups.layout.world_size,
                peak_tflops=peak,
            )
            is_last = step == parts.total_steps
            if is_due(step, settings.test_freq, is_last):
                metrics |= trainer.evaluate()
            if is_due(step, settings.save_freq, is_last):
                with parts.timers("save_checkpoint"):
                    save(parts, step)
            tracker.log(step, {**metrics, **times, **parts.timers.flush(), "training/epoch": parts.sampler.epoch})
        if config.checkpoint.export_hf:
            tracker.text(f"exported to {export_final(parts.model.model, config)}")
    dist.barrier()


def _build_parts(config: RunConfig, groups: Groups) -> SFTParts:
    chat = load_chat_tokenizer(config.model.path)
    train_data = SftDataset(config.data.train_files, chat, config.data)
    val_data = SftDataset(config.data.val_files, chat, config.data) if config.data.val_files else None
    seed = config.data.seed if config.data.seed is not None else config.trainer.seed
    sampler = PromptSampler(len(train_data), config.data.train_batch_size, shuffle=config.data.shuffle, seed=seed)
    by_epochs = sampler.num_batches(config.trainer.total_epochs)
    total_steps = config.trainer.total_training_steps or by_epochs
    model = make_trainable(load_model(config, groups), config)
    return SFTParts(
        config=config,
        groups=groups,
        shape=ModelShape.from_hf(config.model.path),
        train_data=train_data,
        val_data=val_data,
        sampler=sampler,
        model=model,
        schedule=learning_rate_schedule(model.optimizer, config.optim, total_steps),
        timers=Timers(),
        metrics=MetricSums(KINDS, platform.current().device),
        total_steps=total_steps,
    )
