"""Rules of preference optimisation. Imports no torch."""

from collections.abc import Iterator

from megarl.config.layout import Layout
from megarl.config.model_shape import ModelShape
from megarl.config.schema import RunConfig
from megarl.config.schema_preference import PREFERENCE_LOSSES
from megarl.config.validate_models import other_model_problems
from megarl.config.validate_rl import engine_problems, reward_problems

_IMITATING = ("spin",)
"""Losses whose rounds need no scores."""


def preference_problems(config: RunConfig, layout: Layout, model: ModelShape | None) -> Iterator[str]:
    """What is wrong with a config of `trainer.kind: preference`, beyond what concerns every kind."""
    settings = config.preference
    yield from _loss_problems(config)
    if settings.rounds:
        yield from _round_problems(config, layout, model)
        return
    if settings.loss_type in _IMITATING:
        yield (
            f"preference.loss_type {settings.loss_type} learns from the policy's own responses, but preference.rounds "
            "is 0: set it to 1 or more."
        )
    if settings.prompts_per_round is not None:
        yield (
            f"preference.prompts_per_round is {settings.prompts_per_round}, but preference.rounds 0: set both or "
            "neither."
        )


def _loss_problems(config: RunConfig) -> Iterator[str]:
    settings = config.preference
    belongs_to = {
        "label_smoothing": ("dpo", settings.label_smoothing != 0),
        "desirable_weight": ("kto", settings.desirable_weight != 1),
        "undesirable_weight": ("kto", settings.undesirable_weight != 1),
    }
    for name, (loss, is_set) in belongs_to.items():
        # Losses of a person's own may read anything.
        if is_set and settings.loss_type in PREFERENCE_LOSSES and settings.loss_type != loss:
            yield (
                f"preference.{name} is {getattr(settings, name)}, but only {loss} has it and preference.loss_type is "
                f"{settings.loss_type}: leave it out."
            )
    if settings.desirable_weight == settings.undesirable_weight == 0:
        yield "preference.desirable_weight and preference.undesirable_weight are 0: nothing would be learned."


def _round_problems(config: RunConfig, layout: Layout, model: ModelShape | None) -> Iterator[str]:
    settings, rollout = config.preference, config.rollout
    yield from engine_problems(config, layout.world_size, model)
    if rollout.engine == "dataset" or rollout.replay_dir is not None:
        what = "rollout.engine is dataset" if rollout.engine == "dataset" else "rollout.replay_dir is set"
        yield f"preference.rounds {settings.rounds} generates, but {what}: leave that out."
    if not config.checkpoint.export_hf:
        yield (
            "checkpoint.export_hf is false, but each of preference.rounds starts from the model that the one before "
            "exported: set it to true."
        )
    if config.trainer.resume_mode == "path":
        yield "trainer.resume_mode path does not say which of preference.rounds it is in: use auto, which finds out."
    if settings.loss_type in _IMITATING:
        return
    yield from reward_problems(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    yield from other_model_problems("reward.model.path", config.reward.model.path, layout, longest)
    if rollout.n < 2:
        yield (
            f"preference.rounds {settings.rounds} makes pairs of the samples of a prompt, but rollout.n is "
            f"{rollout.n}: set it to 2 or more."
        )
