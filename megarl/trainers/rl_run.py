"""From the first evaluation of an RL run to its export."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megarl.config import RunConfig
from megarl.observe import StepProfiler, Tracker
from megarl.parallel.groups import Groups
from megarl.trainers.evaluation import evaluate
from megarl.trainers.finish import export_final
from megarl.trainers.guard import ActingGuards
from megarl.trainers.preemption import Preempted, agreed_request, stop_before_first_step
from megarl.trainers.rl import RLTrainer
from megarl.trainers.rl_parts import RLParts, build_rl_parts
from megarl.trainers.state import RunCheckpoints, is_due


def run_rl(config: RunConfig, groups: Groups) -> None:
    """Runs RL to its end. Collective over the world.

    Raises:
        ConfigError: anything that a person has to put right.
        Preempted: somebody asked the run to stop.
        RuntimeError: a sync that changed a tensor.
    """
    parts = build_rl_parts(config, groups)
    try:
        checkpoints = RunCheckpoints(parts, parts.others, parts.further_models)
        start = checkpoints.resume()
        with _tracker(parts, start) as tracker:
            _describe(parts, tracker)
            checkpoints.report_to(tracker.text)
            trainer = RLTrainer(parts)
            trainer.sync()
            if config.trainer.val_before_train and start == 0:
                tracker.log(0, run_evaluation(parts, 0))
            guards = _acting_guards(trainer, tracker, checkpoints, start)
            _steps(trainer, tracker, checkpoints, guards, start)
            checkpoints.finish()
            if summary := guards.summary():
                tracker.text(summary)
            if config.checkpoint.export_hf:
                tracker.text(f"exported to {export_final(parts.actor.model, config)}")
                for name, saved in parts.further_models.items():
                    folder = export_final(
                        saved.trainable.model, config, name=f"{name}-hf", source_folder=saved.source_hf
                    )
                    tracker.text(f"exported the {name} to {folder}")
    finally:
        parts.close()


def _acting_guards(trainer: RLTrainer, tracker: Tracker, checkpoints: RunCheckpoints, start: int) -> ActingGuards:
    parts = trainer.parts
    return ActingGuards(
        parts.guards,
        trainer.watch,
        parts.config,
        schedules=[schedule for schedule in (parts.schedule, parts.critic_schedule) if schedule is not None],
        sampler=parts.sampler,
        checkpoints=checkpoints,
        after_rollback=trainer.sync,
        tell=tracker.text,
        start=start,
        total_steps=parts.total_steps,
    )


def _steps(trainer: RLTrainer, tracker: Tracker, checkpoints: RunCheckpoints, guards: ActingGuards, start: int) -> None:
    parts, config = trainer.parts, trainer.config.trainer
    profiler = StepProfiler(parts.config, parts.groups.rank)
    stop_before_first_step(start)
    step = start
    while step < parts.total_steps:
        step += 1
        with profiler.step(step):
            metrics = trainer.train_step(step, parts.train_data.prompts(parts.sampler.next_batch()))
        is_last = step == parts.total_steps
        if is_due(step, config.test_freq, is_last):
            metrics |= run_evaluation(parts, step)
        metrics["training/epoch"] = parts.sampler.epoch
        verdict = guards.after_step(step, metrics)
        request = agreed_request()
        if verdict.may_save and (is_due(step, config.save_freq, is_last) or request):
            with parts.timers("save_checkpoint"):
                checkpoints.save(step, metrics, protected=guards.protected(step), wait=bool(request))
        tracker.log(step, metrics | verdict.metrics | parts.timers.flush())
        checkpoints.poll()
        guards.check(verdict)
        step = verdict.step
        if request and step < parts.total_steps:
            raise Preempted(step, request, max(checkpoints.steps, default=0))


def run_evaluation(parts: RLParts, step: int) -> dict[str, float]:
    """Metrics on the held-out prompts; none where there are no such."""
    if parts.val_data is None:
        return {}
    config = parts.config.trainer
    folder = config.validation_data_dir or Path(config.default_local_dir, "validation")
    with parts.timers("testing"):
        samplings = {"core": parts.val_sampling}
        if sampled := parts.config.rollout.val_sampled_n:
            samplings["sampled"] = dataclasses.replace(parts.sampling, n=sampled)
        metrics = {}
        for kind, sampling in samplings.items():
            metrics |= evaluate(
                parts.val_data, parts.generator, sampling, parts.groups, step=step, folder=folder, kind=kind
            )
        return metrics


def _tracker(parts: RLParts, start: int) -> Tracker:
    return Tracker(
        parts.config,
        parts.groups.rank == 0,
        parts.total_steps,
        {"grpo": "GRPO", "gae": "PPO"}.get(parts.config.algorithm.adv_estimator, "RL"),
        resume_step=start or None,
    )


def _describe(parts: RLParts, tracker: Tracker) -> None:
    tracker.text(f"layout: {parts.groups.layout.describe()}")
    for data in (parts.train_data, parts.val_data):
        if data is not None:
            tracker.text(data.description())
