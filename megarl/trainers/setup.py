"""What loops start from: the models of a config on this rank, and a person's own functions."""

from __future__ import annotations

from pathlib import Path

from megarl import platform
from megarl.algorithms.plugins import load_plugins
from megarl.config import ConfigError, RunConfig
from megarl.config.schema_learning import OptimConfig
from megarl.data.chat import ChatTokenizer, load_chat_tokenizer
from megarl.models.bridge import read_hf_config
from megarl.models.build import MegatronModel, Role, build_model, config_overrides
from megarl.models.router_losses import RouterLossWeights
from megarl.models.train import TrainableModel, optimizer_config
from megarl.parallel.groups import Groups
from megarl.weights.load_hf import load_hf


def load_model(
    config: RunConfig,
    groups: Groups,
    *,
    role: Role = Role.CAUSAL_LM,
    path: str | Path | None = None,
    needs_head: bool = False,
) -> MegatronModel:
    """A model of the run with its weights, computed as `model` says. Collective over the world.

    Args:
        path: a Hugging Face folder; `model.path` if not given. A critic or reward model may come from a language model,
            whose head is then new, or from one that has a scalar head (`weights.load_hf`).
        needs_head: refuse one whose head would be new.

    Raises:
        ConfigError: the folder cannot be loaded, or lacks a head that it needs.
    """
    folder = Path(config.model.path if path is None else path)
    hf_config = read_hf_config(folder)
    model = build_model(
        hf_config,
        groups,
        role=role,
        dtype=platform.parse_dtype(config.model.dtype),
        backend=config.model.backend,
        overrides=config_overrides(config.model),
    )
    load_hf(model, folder, head_seed=config.trainer.seed, needs_head=needs_head)
    return model


def check_same_tokens(folder: str | Path, key: str, chat: ChatTokenizer, *, template: bool = True) -> None:
    """Whether another model reads the token ids of this run's as they are meant.

    Args:
        folder: of the other model.
        key: of the config that names it, for errors.
        chat: this run's.
        template: whether it has to have the same chat template too.

    Raises:
        ConfigError: it has another vocabulary, another chat template, or no tokenizer.
    """
    other = load_chat_tokenizer(folder, key)
    same = {"vocabulary": other.tokenizer.get_vocab() == chat.tokenizer.get_vocab()}
    if template:
        same["chat template"] = other.tokenizer.get_chat_template() == chat.tokenizer.get_chat_template()
    for what, is_same in same.items():
        if not is_same:
            raise ConfigError(
                f"{key} {folder} has another {what} than model.path {chat.path}, so it would read other tokens than "
                "are meant; take one that was made from a model with the same tokenizer."
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
        router_losses=RouterLossWeights(aux_loss=config.model.moe_aux_loss_coeff, z_loss=config.model.moe_z_loss_coeff),
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
