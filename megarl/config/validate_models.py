"""Rules for models that stand beside `model.path` in the same layout: critic, reward model, teacher."""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.layout import Layout
from megarl.config.model_shape import ModelShape


def other_model_problems(key: str, path: str | None, layout: Layout, longest: int) -> Iterator[str]:
    """Why a model cannot be used in a layout; nothing of what is wrong with the layout itself.

    Args:
        key: the config key that names the model.
        path: its folder; one that does not exist is reported with the other files.
        longest: tokens that a sequence may have.
    """
    if path is None or not Path(path).is_dir():
        return
    try:
        shape = ModelShape.from_hf(path)
    except ConfigError as error:
        yield from (f"{key}: {problem}" for problem in error.problems)
        return
    of_layout = layout.problems(None)
    shared = " The layout is that of model.path too, so choose another model if that needs it."
    yield from (f"{key}: {problem}{shared}" for problem in layout.problems(shape) if problem not in of_layout)
    if longest > shape.max_positions:
        yield (
            f"{key}: the model has {shape.max_positions} positions, but data.max_prompt_length + "
            f"data.max_response_length is {longest} tokens: shorten one of them, or choose another model."
        )
