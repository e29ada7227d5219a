"""What both loops start from: the models of a config on this rank."""

from __future__ import annotations

from megarl import platform
from megarl.config import RunConfig
from megarl.models.bridge import read_hf_config
from megarl.models.build import MegatronModel, build_model, recompute_overrides
from megarl.models.train import TrainableModel, optimizer_config
from megarl.parallel.groups import Groups
from megarl.weights.load_hf import load_hf


def load_model(config: RunConfig, groups: Groups) -> MegatronModel:
    """The model of `model.path` with its weights. Collective over the world.

    Raises:
        ConfigError: the folder cannot be loaded.
    """
    model = build_model(
        read_hf_config(config.model.path),
        groups,
        dtype=platform.parse_dtype(config.model.dtype),
        backend=config.model.backend,
        overrides=recompute_overrides(config.model),
    )
    load_hf(model, config.model.path)
    return model


def make_trainable(model: MegatronModel, config: RunConfig) -> TrainableModel:
    """`model` with gradient buffers and optimizer."""
    parallel = config.parallel
    return TrainableModel(
        model,
        optimizer_config(
            config.optim,
            model.dtype,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
        ),
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
