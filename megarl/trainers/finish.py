"""The end of a run: its model as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.publish import publish
from megarl.config import ConfigError, RunConfig
from megarl.models.build import MegatronModel
from megarl.weights.save_hf import save_hf

EXPORT_NAME = "hf"


def export_final(
    model: MegatronModel, config: RunConfig, *, name: str = EXPORT_NAME, source_folder: str | Path | None = None
) -> Path:
    """Writes the model into `trainer.default_local_dir`; one of an earlier run is replaced when it is whole.

    Collective over the world.

    Args:
        name: of the folder, where a run has several models.
        source_folder: what the model was made from, which gives config.json and tokenizer; `model.path` if not given.

    Raises:
        ConfigError: on every rank; the folder cannot be written.
    """
    target = Path(config.trainer.default_local_dir, name)
    new = target.with_name(f"{target.name}-new")
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
    dist.barrier()
    try:
        with publish(new) as folder:
            save_hf(model, folder, source_folder=source_folder or config.model.path)
    except ConfigError as error:
        rest = "trains it anew (trainer.save_freq was not set)"
        if config.trainer.save_freq >= 1:
            rest = "goes on at the newest checkpoint and exports it"
        raise ConfigError(
            f"the trained model was not exported to {target}: {error}. Put that right; the same command then {rest}."
        ) from None
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    dist.barrier()
    return target
