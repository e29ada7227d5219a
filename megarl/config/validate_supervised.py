"""Rules of the runs that learn from data as it is: SFT, reward models and preferences. Imports no torch."""

from collections.abc import Iterator

from megarl.config.layout import Layout
from megarl.config.schema import RunConfig
from megarl.config.validate_models import other_model_problems

SUPERVISED_KINDS = ("sft", "reward_model", "preference")


def supervised_problems(config: RunConfig, layout: Layout) -> Iterator[str]:
    """What is wrong with a run of one of `SUPERVISED_KINDS`; of other runs, with what only these can do."""
    yield from _early_stopping_problems(config)
    if config.trainer.kind == "reward_model":
        yield from _reward_model_problems(config)
        longest = config.data.max_prompt_length + config.data.max_response_length
        yield from other_model_problems("reward_model.teacher", config.reward_model.teacher, layout, longest)


def _early_stopping_problems(config: RunConfig) -> Iterator[str]:
    trainer, key = config.trainer, "trainer.early_stopping_patience"
    if trainer.early_stopping_patience is None:
        if trainer.early_stopping_min_delta:
            yield f"trainer.early_stopping_min_delta is {trainer.early_stopping_min_delta}, but {key} null: set both."
        return
    if trainer.kind not in SUPERVISED_KINDS:
        yield f"{key} is {trainer.early_stopping_patience}, but trainer.kind {trainer.kind} has no validation loss."
    elif not config.data.val_files or trainer.test_freq < 1:
        yield (
            f"{key} is {trainer.early_stopping_patience}, but nothing is evaluated during the run: name data.val_files "
            "and set trainer.test_freq."
        )


def _reward_model_problems(config: RunConfig) -> Iterator[str]:
    settings = config.reward_model
    if settings.pairwise_weight == 0 and settings.teacher is None:
        yield "reward_model.pairwise_weight is 0 and reward_model.teacher is null: nothing would be learned; set one."
    if settings.teacher is not None and settings.pairwise_weight == settings.regression_weight == 0:
        yield "reward_model.pairwise_weight and reward_model.regression_weight are 0: nothing would be learned."
