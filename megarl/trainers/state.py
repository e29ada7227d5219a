"""What a loop saves beside its model, and how it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.checkpoint.training import (
    SavedModel,
    checkpoint_folder,
    load_training,
    newest_checkpoint,
    save_training,
)
from megarl.config import ConfigError, RunConfig
from megarl.data.sampler import PromptSampler
from megarl.models.train import TrainableModel


class Resumable(Protocol):
    """The parts of a loop that a checkpoint covers."""

    config: RunConfig
    sampler: PromptSampler
    schedule: Any
    optimizer_steps: int

    @property
    def trainable(self) -> TrainableModel: ...


class Stateful(Protocol):
    """Something else of a loop that goes on where it was, such as a controller."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def save(
    parts: Resumable,
    step: int,
    others: Mapping[str, Stateful] | None = None,
    further_models: Mapping[str, SavedModel] | None = None,
) -> Path:
    """Writes the checkpoint after `step`. Collective over the world.

    Args:
        others: by name; their states are JSON, the same on every rank.
        further_models: by name, such as a critic.
    """
    folder = checkpoint_folder(parts.config.trainer.default_local_dir, step)
    state = {
        "kind": parts.config.trainer.kind,
        "step": step,
        "optimizer_steps": parts.optimizer_steps,
        "sampler": parts.sampler.state_dict(),
        "schedule": parts.schedule.state_dict(),
        "others": {name: other.state_dict() for name, other in (others or {}).items()},
    }
    model = SavedModel(trainable=parts.trainable, source_hf=parts.config.model.path)
    save_training(model, folder, state, further_models or {})
    return folder


def resume(
    parts: Resumable,
    others: Mapping[str, Stateful] | None = None,
    further_models: Mapping[str, SavedModel] | None = None,
) -> int:
    """Restores the checkpoint that `trainer.resume_mode` names, if any; returns the steps it has behind it.

    Collective over the world.

    Args:
        others: as in `save`; one that the checkpoint does not have, because it was switched on since, begins anew.
        further_models: as in `save`; the checkpoint must have them.

    Raises:
        ConfigError: the checkpoint is damaged, or not one of this run.
    """
    folder = _checkpoint_to_resume(parts.config)
    if folder is None:
        return 0
    models = {name: saved.trainable for name, saved in (further_models or {}).items()}
    state = load_training(parts.trainable, folder, models)
    kind = parts.config.trainer.kind
    if state.get("kind") != kind:
        raise ConfigError(
            f"{folder} is a checkpoint of trainer.kind {state.get('kind')}, but this run has {kind}: name another "
            "trainer.default_local_dir, or start from its weights with model.path."
        )
    parts.sampler.load_state_dict(state["sampler"])
    parts.schedule.load_state_dict(state["schedule"])
    parts.optimizer_steps = state["optimizer_steps"]
    for name, other in (others or {}).items():
        if name in state.get("others", {}):
            other.load_state_dict(state["others"][name])
    return int(state["step"])


def is_due(step: int, frequency: int, is_last: bool) -> bool:
    """Whether something that happens every `frequency` steps, and after the last, happens now; −1 is never."""
    return frequency > 0 and (is_last or step % frequency == 0)


def _checkpoint_to_resume(config: RunConfig) -> Path | None:
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "path":
        assert trainer.resume_from_path is not None  # validation has looked
        return Path(trainer.resume_from_path)
    return newest_checkpoint(trainer.default_local_dir)
