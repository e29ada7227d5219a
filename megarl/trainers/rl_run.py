"""From the first evaluation of an RL run to its export."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megarl.config import RunConfig
from megarl.observe import Tracker
from megarl.parallel.groups import Groups
from megarl.trainers.evaluation import evaluate
from megarl.trainers.finish import export_final
from megarl.trainers.guard import GradientGuard
from megarl.trainers.rl import RLTrainer
from megarl.trainers.rl_parts import RLParts, build_rl_parts
from megarl.trainers.state import is_due, resume, save


def run_rl(config: RunConfig, groups: Groups) -> None:
    """Runs RL to its end. Collective over the world.

    Raises:
        ConfigError: anything that a person has to put right.
        RuntimeError: a sync that changed a tensor, or gradients that stay NaN.
    """
    parts = build_rl_parts(config, groups)
    try:
        start = resume(parts, parts.others, parts.further_models)
        with _tracker(parts, start) as tracker:
            _describe(parts, tracker, start)
            trainer = RLTrainer(parts)
            trainer.sync()
            if config.trainer.val_before_train and start == 0:
                tracker.log(0, run_evaluation(parts, 0))
            _steps(trainer, tracker, start)
            if config.checkpoint.export_hf:
                tracker.text(f"exported to {export_final(parts.actor.model, config)}")
                for name, saved in parts.further_models.items():
                    folder = export_final(
                        saved.trainable.model, config, name=f"{name}-hf", source_folder=saved.source_hf
                    )
                    tracker.text(f"exported the {name} to {folder}")
    finally:
        parts.close()


def _steps(trainer: RLTrainer, tracker: Tracker, start: int) -> None:
    parts, config = trainer.parts, trainer.config.trainer
    guard, warned = GradientGuard("the rewards of these steps"), False
    for step in range(start + 1, parts.total_steps + 1):
        metrics = trainer.train_step(step, parts.train_data.prompts(parts.sampler.next_batch()))
        skipped = any(metrics.get(f"{name}/skipped_updates") for name in ("actor", "critic"))
        guard.after_step(step, skipped=skipped)
        if metrics["response_length/clip_ratio"] == 1.0 and not warned:
            warned = True
            tracker.text(
                f"warning: step {step}: every response was cut off at data.max_response_length "
                f"{parts.config.data.max_response_length}, so none has its ending; raise it, or see whether the model "
                "ever writes its end token."
            )
        is_last = step == parts.total_steps
        if is_due(step, config.test_freq, is_last):
            metrics |= run_evaluation(parts, step)
        if is_due(step, config.save_freq, is_last):
            with parts.timers("save_checkpoint"):
                save(parts, step, parts.others, parts.further_models)
        metrics["training/epoch"] = parts.sampler.epoch
        tracker.log(step, metrics | parts.timers.flush())


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
    config = parts.config.trainer
    return Tracker(
        config.logger,
        config.default_local_dir,
        parts.groups.rank == 0,
        parts.total_steps,
        {"grpo": "GRPO", "gae": "PPO"}.get(parts.config.algorithm.adv_estimator, "RL"),
        resume_step=start or None,
    )


def _describe(parts: RLParts, tracker: Tracker, start: int) -> None:
    tracker.text(f"layout: {parts.groups.layout.describe()}")
    for data in (parts.train_data, parts.val_data):
        if data is not None:
            tracker.text(data.description())
    if start:
        tracker.text(f"resumed after step {start}")
