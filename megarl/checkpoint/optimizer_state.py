"""The optimizer's state in Megatron-Core's dist_checkpoint format: float32 weights and moments, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megarl.checkpoint.dist_format import InProcessSave, load_sharded
from megarl.models.train import TrainableModel

# Of the formats of Megatron-Core's distributed optimizer the one that every layout can read.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def write_optimizer(trainable: TrainableModel, folder: Path) -> None:
    """Writes the state into `folder`, an existing empty folder. Collective over the world."""
    # An actor that waits for its critic has made no step yet.
    _allocate(trainable)
    state = _sharded_state(trainable, is_loading=False)
    dist_checkpointing.save(state, str(folder), sharded_strategy=InProcessSave(None))


def read_optimizer(trainable: TrainableModel, folder: Path) -> None:
    """Restores the state from `folder`, whatever layout wrote it. Collective over the world.

    The float32 weights come along, so a model in bfloat16 goes on from what the optimizer had.

    Raises:
        ConfigError: on every rank; the folder is missing or damaged.
    """
    _allocate(trainable)
    state = _sharded_state(trainable, is_loading=True)
    trainable.optimizer.load_state_dict(load_sharded(state, folder)["optimizer"])
    for inner in _torch_adams(trainable):
        for values in inner.state.values():
            # Megatron-Core restores one `step` tensor and gives it to every parameter; Adam would then count each
            # step once for every parameter, and its bias correction be silently wrong.
            values["step"] = values["step"].clone()


def _allocate(trainable: TrainableModel) -> None:
    """Gives torch's Adam the state that its first step would make.

    Megatron-Core allocates the moments itself but not torch's `step`, without which neither it nor torch can go on.
    """
    for inner in _torch_adams(trainable):
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _torch_adams(trainable: TrainableModel) -> list[torch.optim.Adam]:
    """The optimizers within Megatron-Core's that are torch's; Transformer Engine's FusedAdam needs none of this."""
    parts = getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer])
    return [part.optimizer for part in parts if isinstance(part.optimizer, torch.optim.Adam)]  # AdamW is an Adam


def _sharded_state(trainable: TrainableModel, *, is_loading: bool) -> dict[str, Any]:
    metadata = {**_METADATA, "dp_cp_group": trainable.model.groups.dp_cp}
    chunks = trainable.model.chunks
    # The optimizer finds each parameter's shape and place in the model's own state; keys as it expects them.
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    model = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
    return {
        "optimizer": trainable.optimizer.sharded_state_dict(
            model if len(chunks) > 1 else model["model"], is_loading=is_loading, metadata=metadata
        )
    }
