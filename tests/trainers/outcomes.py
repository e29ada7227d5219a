"""Runs several configs one after another on the ranks of this world, those too that cannot go on."""

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

DONE = "the run went to its end"


def outcomes(config_path: Path, output: Path, runs: dict[str, list[str]]) -> dict[str, str]:
    """The sentence that ended each run, or `DONE`; anything but a `ConfigError` ends this program.

    Args:
        output: each run has a folder of its name in it.
        runs: settings that replace those of the config, by name.
    """
    found = {}
    for name, overrides in runs.items():
        config = load_config(config_path, [*overrides, f"trainer.default_local_dir={output / name}"])
        assert validate(config, dist.get_world_size()) == [], name
        groups = build_groups(config.parallel.layout(dist.get_world_size()), seed=config.trainer.seed)
        try:
            LOOPS[config.trainer.kind](config, groups)
            found[name] = DONE
        except ConfigError as error:
            found[name] = str(error)
    return found


def is_one_sentence(text: str) -> bool:
    """One line that ends in a full stop."""
    return "\n" not in text and text.endswith(".")
