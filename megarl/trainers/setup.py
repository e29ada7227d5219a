"""What loops start from: the models of a config on this rank, and a person's own functions."""

from __future__ import annotations

from pathlib import Path

from megarl import platform
from megarl.algorithms.plugins import load_plugins
from megarl.config import ConfigError, ModelShape, RunConfig
from megarl.config.schema_learning import OptimConfig
from megarl.models.bridge import read_hf_config
from megarl.models.build import MegatronModel, Role, build_model, config_overrides
from megarl.models.train import TrainableModel, optimizer_config
from megarl.parallel.groups import Groups
from megarl.weights.load_hf import load_hf


def load_model(
    config: RunConfig, groups: Groups, *, role: Role = Role.CAUSAL_LM, path: str | Path | None = None
) -> MegatronModel:
    """A model of the run with its weights, computed as `model` says. Collective over the world.

    Args:
        path: a Hugging Face folder; `model.path` if not given. A critic or reward model may come from a language model,
            whose head is then new, or from one that has a scalar head (`weights.load_hf`).

    Raises:
        ConfigError: the folder cannot be loaded, or a critic does not know the tokens that it is to value.
    """
    folder = Path(config.model.path if path is None else path)
    hf_config = read_hf_config(folder)
    if role is Role.CRITIC:
        _check_vocabulary(folder, hf_config.vocab_size, Path(config.model.path))
    model = build_model(
        hf_config,
        groups,
        role=role,
        dtype=platform.parse_dtype(config.model.dtype),
        backend=config.model.backend,
        overrides=config_overrides(config.model),
    )
    load_hf(model, folder, head_seed=config.trainer.seed)
    return model


def _check_vocabulary(critic: Path, vocab_size: int, actor: Path) -> None:
    """A critic reads the actor's token ids as they are. A larger vocabulary is one that is padded."""
    wanted = ModelShape.from_hf(actor).vocab_size
    if vocab_size < wanted:
        raise ConfigError(
            f"{critic} has a vocabulary of {vocab_size} tokens, but model.path {actor} has {wanted}: a critic reads "
            "the actor's token ids, so take one that was made from the same model."
        )


def make_trainable(model: MegatronModel, config: RunConfig, optim: OptimConfig | None = None) -> TrainableModel:
    """`model` with gradient buffers and optimizer.

    Args:
        optim: of a model with an optimizer of its own; `optim` of the config if not given.
    """
    parallel = config.parallel
    return TrainableModel(
        model,
        optimizer_config(
            config.optim if optim is None else optim,
            model.dtype,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
        ),
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )


def load_plugins_of(config: RunConfig) -> None:
    """Registers what the files of `algorithm.plugins` bring.

    Raises:
        ConfigError: a file that cannot be used.
    """
    try:
        load_plugins(config.algorithm.plugins, "algorithm.plugins")
    except ValueError as error:
        raise ConfigError(str(error)) from None
