"""What runs say that cannot go on: each rank's error, as a person reads it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch.distributed as dist

from megarl import platform

platform.current()  # prepares Megatron-Core before anything imports it
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

from megarl.config import ConfigError, load_config, validate  # noqa: E402
from megarl.parallel.groups import build_groups  # noqa: E402
from megarl.trainers.run import LOOPS  # noqa: E402


def refusals(config_path: Path, runs: dict[str, list[str]]) -> dict[str, str]:
    """The sentence that ends each run; anything but a `ConfigError` ends this program.

    Args:
        runs: settings that replace those of the config, by name.
    """
    messages = {}
    for name, overrides in runs.items():
        config = load_config(config_path, [*overrides, f"trainer.default_local_dir={config_path.parent / name}"])
        assert validate(config, dist.get_world_size()) == [], name
        groups = build_groups(config.parallel.layout(dist.get_world_size()), seed=config.trainer.seed)
        try:
            LOOPS[config.trainer.kind](config, groups)
            messages[name] = "nothing was wrong"
        except ConfigError as error:
            messages[name] = str(error)
    return messages


def is_one_sentence(message: str) -> bool:
    """One line that ends in a full stop."""
    return "\n" not in message and message.endswith(".") and "Traceback" not in message
