"""Rules for the `checkpoint` section."""

from collections.abc import Iterator

from megarl.config.schema import RunConfig


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong between `checkpoint` and the rest of the config."""
    settings, trainer = config.checkpoint, config.trainer
    if settings.keep_last is None and (settings.keep_every is not None or settings.keep_best):
        named = "keep_every" if settings.keep_every is not None else "keep_best"
        yield (
            f"checkpoint.{named} says which checkpoints stay when old ones are deleted, but checkpoint.keep_last null "
            "deletes none: set it to 1 or more."
        )
    if settings.keep_best and settings.best_metric is None:
        yield (
            f"checkpoint.keep_best is {settings.keep_best}, but checkpoint.best_metric is null: name a metric, such as "
            "critic/score/mean or val/loss."
        )
    if settings.best_metric is None or not settings.best_metric.startswith("val"):
        return
    if trainer.test_freq <= 0:
        yield (
            f"checkpoint.best_metric {settings.best_metric} is measured in evaluations, but trainer.test_freq is "
            f"{trainer.test_freq}: set it to trainer.save_freq, or name a metric of training."
        )
    elif trainer.save_freq > 0 and trainer.save_freq % trainer.test_freq:
        yield (
            f"checkpoint.best_metric {settings.best_metric} is measured every {trainer.test_freq} steps "
            f"(trainer.test_freq), but checkpoints are taken every {trainer.save_freq} (trainer.save_freq): make the "
            "second a multiple of the first."
        )
