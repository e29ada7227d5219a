"""The end of a run: its model as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.publish import publish
from megarl.config import RunConfig
from megarl.models.build import MegatronModel
from megarl.weights.export_hf import save_hf

EXPORT_NAME = "hf"


def export_final(model: MegatronModel, config: RunConfig) -> Path:
    """Writes the model to `hf` in `trainer.default_local_dir`; one of an earlier run is replaced when it is whole.

    Collective over the world.
    """
    target = Path(config.trainer.default_local_dir, EXPORT_NAME)
    new = target.with_name(f"{target.name}-new")
    if dist.get_rank() == 0:
        shutil.rmtree(new, ignore_errors=True)
    dist.barrier()
    with publish(new) as folder:
        save_hf(model, folder, source_folder=config.model.path)
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    dist.barrier()
    return target
