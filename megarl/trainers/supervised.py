"""The loop of everything that learns from data as it is: a `Task` says what one example is and what its loss is."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megarl import platform
from megarl.config import ModelShape, RunConfig
from megarl.config.guard_rules import guard_rules
from megarl.data.sampler import PromptSampler
from megarl.models.pipeline import OutputFunction, run_pipeline
from megarl.models.train import TrainableModel, learning_rate_schedule
from megarl.observe import MetricSums, ModelFlops, StepProfiler, Timers, Tracker, measure_peak_tflops
from megarl.observe.flops import performance
from megarl.observe.guards import Guards
from megarl.observe.reduce import Kind
from megarl.parallel.balance import partition, sequence_flops
from megarl.parallel.groups import Groups
from megarl.trainers.early_stopping import EarlyStopping
from megarl.trainers.finish import export_final
from megarl.trainers.guard import ActingGuards
from megarl.trainers.minibatch import MiniBatch, Row, make_mini_batch
from megarl.trainers.preemption import Preempted, agreed_request, stop_before_first_step
from megarl.trainers.state import RunCheckpoints, Stateful, is_due
from megarl.trainers.update_watch import Add, UpdateWatch


class Dataset(Protocol):
    """Usable rows, numbered from 0."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray:
        """Tokens: int32 [rows], or [rows, sequences of a row]."""
        ...

    @property
    def fingerprint(self) -> str:
        """What tells its rows from others (`data.fingerprint`)."""
        ...

    def description(self) -> str:
        """What is used and what is left out, for people."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """What one row of the data is to a loss."""

    rows: tuple[Row, ...]
    """Its sequences, which stay in one pack; of all examples equally many."""
    weight: float
    """What it adds to the number that losses are a mean over: its learned tokens, or 1."""


class Task(abc.ABC):
    """What is learned."""

    title: str
    """For people, e.g. `SFT`."""
    notes: Sequence[str] = ()
    """What else a person should know at the start of the run; a line each."""
    columns: tuple[str, ...]
    """The per-token values that its rows bring along."""
    metrics: tuple[str, ...]
    """Means over the weights of examples, of which `loss` is one; reported as `train/…` and `val/…`."""
    train_data: Dataset
    val_data: Dataset | None

    @abc.abstractmethod
    def examples(self, data: Any, indices: Sequence[int]) -> list[Example]:
        """Examples by their numbers among the usable rows of one of its datasets."""

    def begin_batch(self, data: Any, indices: Sequence[int], model: TrainableModel) -> None:  # noqa: B027
        """Is called before a loss is asked for, with the rows of the whole batch: for what it needs of all of them.

        Collective over the world. Most losses need nothing.
        """

    @abc.abstractmethod
    def output_function(self, model: TrainableModel, total: float) -> OutputFunction:
        """The loss of a batch whose examples weigh `total` over all ranks.

        It hands back `sums`: the sum of each metric over this rank's tokens or examples, under its name; `count`, what
        these sums are over; and, where some are over less, `counts` of these. Ranks that share an example each give
        their share of all.
        """

    def held_out_metrics(self, model: TrainableModel) -> dict[str, float]:
        """Metrics of the held-out rows that are no means over examples. Collective over the world."""
        return {}


@dataclass(kw_only=True, slots=True)
class SupervisedParts:
    """What the loop works with."""

    config: RunConfig
    groups: Groups
    shape: ModelShape
    task: Task
    sampler: PromptSampler
    model: TrainableModel
    schedule: Any
    """Megatron-Core's learning-rate scheduler."""
    early_stopping: EarlyStopping | None
    guards: Guards
    timers: Timers
    metrics: MetricSums
    total_steps: int
    optimizer_steps: int = 0

    @property
    def trainable(self) -> TrainableModel:
        """What checkpoints cover."""
        return self.model

    @property
    def others(self) -> Mapping[str, Stateful]:
        """What checkpoints cover beside it."""
        found: dict[str, Stateful | None] = {"early_stopping": self.early_stopping, "guards": self.guards}
        return {name: other for name, other in found.items() if other is not None}


class SupervisedTrainer:
    """The loop of one rank."""

    def __init__(self, parts: SupervisedParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.groups = parts.groups
        self.watch = UpdateWatch(parts.guards, parts.groups)

    def train_step(self, indices: Sequence[int]) -> dict[str, float]:
        """One optimizer step on a global batch of rows, the same numbers on every rank."""
        parts = self.parts
        with parts.timers("step"):
            examples = parts.task.examples(parts.task.train_data, indices)
            mini_batch = self.pack(examples)
            parts.task.begin_batch(parts.task.train_data, indices, parts.model)
            parts.schedule.step(1)
            total = sum(example.weight for example in examples)
            self.watch.begin_step()
            result = parts.model.step(
                mini_batch.batches,
                parts.task.output_function(parts.model, total),
                veto=self.watch.veto("train/grad_norm", partial(self._record, "train")),
            )
            parts.optimizer_steps += 1
        self._record("train", parts.metrics.add, result.outputs)
        if self._records_sums and self.groups.is_first_stage:
            padding = mini_batch.padded_tokens - mini_batch.real_tokens
            parts.metrics.add("batch/padding_fraction", padding, count=mini_batch.padded_tokens)
        return {
            **parts.metrics.reduce(self.groups.world),
            "train/grad_norm": result.grad_norm,
            "train/lr": float(parts.model.optimizer.param_groups[0]["lr"]),
            "train/skipped_updates": float(not math.isfinite(result.grad_norm)),
            **parts.model.router_metrics(),
        }

    def evaluate(self) -> dict[str, float]:
        """The metrics of the held-out rows; none where there are no such."""
        parts, data = self.parts, self.parts.task.val_data
        if data is None:
            return {}
        size = self.config.data.train_batch_size
        with parts.timers("testing"), torch.no_grad():
            for start in range(0, len(data), size):
                rows = range(start, min(start + size, len(data)))
                batches = self.pack(parts.task.examples(data, rows)).batches
                parts.task.begin_batch(data, rows, parts.model)
                output_function = parts.task.output_function(parts.model, 1.0)
                outputs = run_pipeline(parts.model.model, batches, output_function, forward_only=True)
                self._record("val", parts.metrics.add, outputs)
            more = parts.task.held_out_metrics(parts.model)
        return parts.metrics.reduce(self.groups.world) | more

    def pack(self, examples: Sequence[Example]) -> MiniBatch:
        """This rank's examples of the global batch, shared out by estimated work, in micro-batches."""
        shape = self.parts.shape
        costs = [sum(sequence_flops(row.token_ids.numel(), shape) for row in example.rows) for example in examples]
        parts = partition(costs, self.groups.layout.dp, equal_counts=False)
        return make_mini_batch(
            [row for i in parts[self.groups.dp.rank()] for row in examples[i].rows],
            self.parts.task.columns,
            self.groups,
            max_tokens=self.config.actor.max_tokens_per_micro_batch,
            work=[sum(costs[i] for i in part) for part in parts],
            together=len(examples[0].rows),
        )

    @property
    def _records_sums(self) -> bool:
        """Whether this rank is the one of its tensor-parallel group that records sums."""
        return self.groups.tp.rank() == 0

    def _record(self, stage: str, add: Add, outputs: Sequence[dict[str, Any]]) -> None:
        if self._records_sums:
            for output in outputs:
                counts = output.get("counts", {})
                for name, value in output["sums"].items():
                    add(f"{stage}/{name}", value, counts.get(name, output["count"]))


def run_supervised(config: RunConfig, groups: Groups, task: Task, model: TrainableModel) -> None:
    """Trains `model` on `task` to the end of the run. Collective over the world.

    Raises:
        ConfigError: anything that a person has to put right.
        Preempted: somebody asked the run to stop.
    """
    parts = _build_parts(config, groups, task, model)
    checkpoints = RunCheckpoints(parts, parts.others)
    start = checkpoints.resume()
    settings = config.trainer
    with Tracker(
        config,
        groups.rank == 0,
        parts.total_steps,
        task.title,
        resume_step=start or None,
    ) as tracker:
        tracker.text(f"layout: {groups.layout.describe()}")
        for data in (task.train_data, task.val_data):
            if data is not None:
                tracker.text(data.description())
        for note in task.notes:
            tracker.text(note)
        checkpoints.report_to(tracker.text)
        trainer = SupervisedTrainer(parts)
        if settings.val_before_train and not start:
            tracker.log(0, _evaluate(trainer, 0))
        guards = _acting_guards(trainer, tracker, checkpoints, start)
        _steps(trainer, tracker, checkpoints, guards, start)
        checkpoints.finish()
        if summary := guards.summary():
            tracker.text(summary)
        if parts.early_stopping is not None:
            tracker.text(parts.early_stopping.description())
            if config.checkpoint.export_hf and parts.early_stopping.best_step is not None:
                tracker.text(_load_best(checkpoints, parts.early_stopping.best_step))
        if config.checkpoint.export_hf:
            tracker.text(f"exported to {export_final(model.model, config)}")
    dist.barrier()


def _acting_guards(
    trainer: SupervisedTrainer, tracker: Tracker, checkpoints: RunCheckpoints, start: int
) -> ActingGuards:
    parts = trainer.parts
    return ActingGuards(
        parts.guards,
        trainer.watch,
        parts.config,
        schedules=[parts.schedule],
        sampler=parts.sampler,
        checkpoints=checkpoints,
        after_rollback=lambda: None,
        tell=tracker.text,
        start=start,
        total_steps=parts.total_steps,
    )


def _steps(
    trainer: SupervisedTrainer, tracker: Tracker, checkpoints: RunCheckpoints, guards: ActingGuards, start: int
) -> None:
    parts, settings = trainer.parts, trainer.config.trainer
    peak = trainer.config.observe.peak_tflops or measure_peak_tflops(parts.model.model.dtype)
    flops = ModelFlops(shape=parts.shape)
    profiler = StepProfiler(parts.config, parts.groups.rank)
    stop_before_first_step(start)
    step = start
    while step < parts.total_steps and not _is_over(parts):
        step += 1
        rows = parts.sampler.next_batch()
        with profiler.step(step):
            metrics = trainer.train_step(rows)
        times = parts.timers.flush()
        lengths = parts.task.train_data.lengths[rows].ravel().tolist()
        metrics |= performance(
            flops=flops.update(lengths),
            tokens=sum(lengths),
            seconds=times["timing_s/step"],
            world_size=parts.groups.layout.world_size,
            peak_tflops=peak,
        )
        if is_due(step, settings.test_freq, step == parts.total_steps):
            metrics |= _evaluate(trainer, step)
        is_last = step == parts.total_steps or _is_over(parts)
        metrics["training/epoch"] = parts.sampler.epoch
        verdict = guards.after_step(step, {**metrics, **times})
        request = agreed_request()
        if verdict.may_save and (is_due(step, settings.save_freq, is_last) or request):
            protected = [*_best_steps(parts), *guards.protected(step)]
            with parts.timers("save_checkpoint"):
                checkpoints.save(step, metrics, protected=protected, wait=bool(request))
        tracker.log(step, {**metrics, **times, **verdict.metrics, **parts.timers.flush()})
        checkpoints.poll()
        guards.check(verdict)
        step = verdict.step
        if request and step < parts.total_steps and not _is_over(parts):
            raise Preempted(step, request, max(checkpoints.steps, default=0))


def _best_steps(parts: SupervisedParts) -> tuple[int, ...]:
    """The step whose checkpoint early stopping would export."""
    best = None if parts.early_stopping is None else parts.early_stopping.best_step
    return () if best is None else (best,)


def _load_best(checkpoints: RunCheckpoints, step: int) -> str:
    """The model as it was after the step that early stopping found best, if that can be had; says which it is now."""
    if checkpoints.load_weights_of(step):
        return f"early stopping: the weights that are exported are those of step {step}."
    why = f"step {step} has no checkpoint; with trainer.save_freq equal to trainer.test_freq it would" if step else ""
    why = why or "no step was better than model.path"
    return f"warning: early stopping: the weights that are exported are those of the last step, since {why}."


def _is_over(parts: SupervisedParts) -> bool:
    return parts.early_stopping is not None and parts.early_stopping.is_over


def _evaluate(trainer: SupervisedTrainer, step: int) -> dict[str, float]:
    """Evaluates, and tells early stopping. Every rank has the same numbers and so the same opinion."""
    metrics, early_stopping = trainer.evaluate(), trainer.parts.early_stopping
    if early_stopping is not None:
        early_stopping.update(step, metrics["val/loss"])
    return metrics


def _build_parts(config: RunConfig, groups: Groups, task: Task, model: TrainableModel) -> SupervisedParts:
    seed = config.data.seed if config.data.seed is not None else config.trainer.seed
    sampler = PromptSampler(
        len(task.train_data),
        config.data.train_batch_size,
        shuffle=config.data.shuffle,
        seed=seed,
        fingerprint=task.train_data.fingerprint,
    )
    total_steps = config.trainer.total_training_steps or sampler.num_batches(config.trainer.total_epochs)
    kinds: dict[str, Kind] = {f"{stage}/{name}": "mean" for stage in ("train", "val") for name in task.metrics}
    return SupervisedParts(
        config=config,
        groups=groups,
        shape=ModelShape.from_hf(config.model.path),
        task=task,
        sampler=sampler,
        model=model,
        schedule=learning_rate_schedule(model.optimizer, config.optim, total_steps),
        early_stopping=EarlyStopping.of(config.trainer),
        guards=Guards(guard_rules(config), config.guard),
        timers=Timers(),
        metrics=MetricSums({**kinds, "batch/padding_fraction": "mean"}, platform.current().device),
        total_steps=total_steps,
    )
