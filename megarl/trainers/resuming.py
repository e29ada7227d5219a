"""Which checkpoint a run goes on at, and whether it can."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from megarl.checkpoint.file_list import damage_of
from megarl.checkpoint.manifest import MANIFEST_NAME
from megarl.checkpoint.retention import CHECKPOINTS_FOLDER, checkpoints_of
from megarl.checkpoint.training import peek_state
from megarl.config import ConfigError, RunConfig
from megarl.config.changes import FIXED, changes
from megarl.data.sampler import PromptSampler
from megarl.weights.together import on_first_rank

Tell = Callable[[str], None]
"""Takes a line for people."""

_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""How often torchrun has started these ranks again, and Slurm this job."""


def check_writable(config: RunConfig) -> None:
    """Tries to write where checkpoints will lie, before hours are spent on what cannot be saved.

    Collective over the world.

    Raises:
        ConfigError: on every rank; it failed.
    """
    if config.trainer.save_freq <= 0:
        return
    folder = Path(config.trainer.default_local_dir, CHECKPOINTS_FOLDER)

    def try_it() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trial = folder / f".trial-{secrets.token_hex(4)}"
            trial.write_bytes(b"trial")
            trial.unlink()
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written into {folder} ({error.strerror}): name another "
                "trainer.default_local_dir, or set trainer.save_freq to -1."
            ) from None

    on_first_rank(try_it)


def find_checkpoint(config: RunConfig, tell: Tell) -> Path | None:
    """The checkpoint that `trainer.resume_mode` means, if there is one, looked through for damage.

    With `auto` it is the newest that is whole, and those that are not are told. A run that torchrun or Slurm starts
    again goes on at its own newest in any mode: it would else begin at the same place each time. Collective over the
    world.

    Raises:
        ConfigError: on every rank; the one that is named is damaged, all are, or a newer megarl wrote it.
    """
    trainer = config.trainer
    # As rank 0 sees them: on a network's file system, ranks may see different ones for a while.
    found = on_first_rank(lambda: _candidates(config))
    if found or trainer.resume_mode == "auto":
        return _newest_whole(found, config, tell)
    if trainer.resume_mode == "disable":
        return None
    assert trainer.resume_from_path is not None  # validation has looked
    folder = Path(trainer.resume_from_path)
    problem = damage_of(folder, contents=config.checkpoint.verify)
    if problem is not None:
        raise ConfigError(f"{problem}; copy it again, or name another one.")
    return folder


def _candidates(config: RunConfig) -> list[Path]:
    """The checkpoints in the run's folder that it may go on at, in order."""
    trainer = config.trainer
    found = list(checkpoints_of(trainer.default_local_dir).values())
    if trainer.resume_mode == "auto":
        return found
    if not any(int(os.environ.get(name) or 0) for name in _RESTART_COUNTS):
        return []
    # Only those of this very run: it may have been ended before it moved those of an earlier one.
    how = {"resume_mode": trainer.resume_mode, "resume_from_path": trainer.resume_from_path}
    recorded = {folder: peek_state(folder).get("config", {}).get("trainer", {}) for folder in found}
    return [folder for folder in found if how.items() <= recorded[folder].items()]


def _newest_whole(found: list[Path], config: RunConfig, tell: Tell) -> Path | None:
    """The last of the checkpoints that is whole; None where there are none at all. Collective over the world."""
    problems = []
    for folder in reversed(found):
        problem = damage_of(folder, contents=config.checkpoint.verify)
        if problem is None:
            if problems:
                tell(f"warning: {'; '.join(problems)}; going on at {folder}, the newest that is whole")
            return folder
        problems.append(problem)
    if problems:
        raise ConfigError(
            f"{'; '.join(problems)}; none before is whole: copy it again, name another one with trainer.resume_mode "
            "path, or begin anew with trainer.resume_mode disable."
        )
    return None


def check_same_run(
    folder: Path, record: Mapping[str, Any], config: RunConfig, models: Collection[str], tell: Tell
) -> None:
    """Tells what has changed in the config since a checkpoint. Collective over the world.

    Args:
        record: of the config that it was made with.
        models: names of the run's further models.

    Raises:
        ConfigError: on every rank; something changed that the run cannot go on with.
    """
    changed = changes(record, config)
    problems = [
        f"{folder} was made with {change.key} {change.before}, but this run has {change.now}, and {FIXED[change.key]}"
        for change in changed
        if change.key in FIXED
    ]
    if config.trainer.total_training_steps is None:
        problems += [
            f"{folder} was made with {change.key} {change.before}, but this run has {change.now}, and its epochs do "
            "not say how many steps that makes (trainer.total_training_steps would, those so far included)"
            for change in changed
            if change.key == "data.train_batch_size"
        ]
    saved = on_first_rank(lambda: {path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}")})
    problems += [f"{folder} has no {name}, which this run has" for name in models if name not in saved]
    problems += [f"{folder} has a {name}, which this run lacks" for name in saved if name not in models]
    if problems:
        raise ConfigError(
            f"{problems[0]}: restore what it was, or start another run (trainer.default_local_dir) from its weights "
            "(model.path)."
        )
    for change in changed:
        tell(f"changed since the checkpoint: {change}")


def restore_sampler(folder: Path, state: dict[str, Any], sampler: PromptSampler, config: RunConfig, tell: Tell) -> None:
    """Lets the rows go on where a checkpoint has them, or begin anew where they are others and may be.

    Args:
        state: of its sampler.

    Raises:
        ConfigError: they are others, or come in another order, and `trainer.resume_with_other_data` is false.
    """
    difference = sampler.difference(state)
    if difference is None:
        sampler.load_state_dict(state)
    elif config.trainer.resume_with_other_data:
        sampler.begin_anew()
        tell(f"changed since the checkpoint: {difference}; the run goes on with the first of them")
    else:
        raise ConfigError(
            f"{folder} was made with other data than {', '.join(config.data.train_files)}: {difference}; restore what "
            "it was, or set trainer.resume_with_other_data to true to go on with the first of these rows."
        )
