"""Every rule between the settings of a run, in one pass that reports all problems at once. Imports no torch."""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megarl.config.batches import BatchPlan
from megarl.config.errors import ConfigError
from megarl.config.fields import Key, config_keys
from megarl.config.model_shape import ModelShape
from megarl.config.schema import RunConfig


def validate(config: RunConfig, world_size: int) -> list[str]:
    """Everything that is wrong with a config for a run of `world_size` ranks: one sentence each, with the key.

    Reads the model's config.json and looks whether files exist; says nothing about what is installed here
    (`missing_packages`), so that a config for GPUs can be checked on a laptop.
    """
    own_values = list(_value_problems(config))
    layout = config.parallel.layout(world_size)
    model, model_problems = _read_model(config)
    layout_problems = layout.problems(model)
    problems = [*own_values, *model_problems, *layout_problems]
    if not own_values and not layout_problems:  # the arithmetic needs sizes that are possible
        problems += BatchPlan.of(config, layout).problems()
    problems += _length_problems(config, model)
    problems += _parallel_switch_problems(config)
    problems += _trainer_problems(config)
    problems += _optim_problems(config)
    if config.trainer.kind != "sft":  # also where the kind itself is wrong: the rest should be reported with it
        problems += _rollout_problems(config, world_size, model)
        problems += _loss_problems(config)
    problems += _file_problems(config)
    return problems


def missing_packages(config: RunConfig) -> list[str]:
    """What the config needs and this machine's environment lacks, one sentence each."""
    needed = {
        "sglang": (
            config.trainer.kind == "rl" and config.rollout.engine == "sglang",
            "rollout.engine is sglang",
            "sglang",
        ),
        "transformer_engine": (config.model.backend == "te", "model.backend is te", "gpu"),
    }
    return [
        f"{reason}, but the package {package} is not installed: pip install 'megarl[{extra}]', or choose another."
        for package, (is_needed, reason, extra) in needed.items()
        if is_needed and find_spec(package) is None
    ]


def _value_problems(config: RunConfig) -> Iterator[str]:
    """Values that their own field does not allow."""
    values = OmegaConf.structured(config)
    for key in config_keys(RunConfig):
        value = OmegaConf.select(values, key.name)
        for item in value if OmegaConf.is_list(value) else [value]:
            if item is not None and (rule := _broken_rule(key, item)):
                yield f"{key.name} is {item!r}, but must be {rule}."


def _broken_rule(key: Key, value: Any) -> str | None:
    rules = key.rules
    if rules.choices and value not in rules.choices:
        return f"one of {', '.join(rules.choices)}"
    if rules.at_least is not None and not value >= rules.at_least:
        return f"at least {rules.at_least}"
    if rules.above is not None and not value > rules.above:
        return f"above {rules.above}"
    if rules.at_most is not None and not value <= rules.at_most:
        return f"at most {rules.at_most}"
    return None


def _read_model(config: RunConfig) -> tuple[ModelShape | None, list[str]]:
    if not config.model.path:
        return None, ["model.path is not set: name the folder of a Hugging Face model."]
    if not Path(config.model.path).is_dir():
        return None, [f"model.path {config.model.path} is not a folder (looked for from {Path.cwd()})."]
    try:
        return ModelShape.from_hf(config.model.path), []
    except ConfigError as error:
        return None, [f"model.path: {problem}" for problem in error.problems]


def _length_problems(config: RunConfig, model: ModelShape | None) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if model is not None and prompt + response > model.max_positions:
        yield (
            f"data.max_prompt_length {prompt} + data.max_response_length {response} = {prompt + response} tokens, "
            f"but the model has {model.max_positions} positions: shorten one of them."
        )


def _parallel_switch_problems(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    needs = {
        "use_distributed_optimizer": parallel.use_distributed_optimizer,
        "overlap_grad_reduce": parallel.overlap_grad_reduce,
    }
    if parallel.overlap_param_gather:
        for name, is_on in needs.items():
            if not is_on:
                yield f"parallel.overlap_param_gather is true, but needs parallel.{name}: set both or neither."


def _rollout_problems(config: RunConfig, world_size: int, model: ModelShape | None) -> Iterator[str]:
    rollout, size = config.rollout, config.rollout.tensor_model_parallel_size
    key = "rollout.tensor_model_parallel_size"
    if config.algorithm.adv_estimator == "grpo" and rollout.n == 1:
        yield "algorithm.adv_estimator grpo compares the samples of a prompt, but rollout.n is 1: set it to at least 2."
    if rollout.val_kwargs.temperature == 0 and rollout.val_kwargs.n > 1:
        yield (
            f"rollout.val_kwargs.n is {rollout.val_kwargs.n}, but with rollout.val_kwargs.temperature 0 all samples of "
            "a prompt are the same: set n to 1, or raise the temperature."
        )
    if 0 in (rollout.top_k, rollout.val_kwargs.top_k):
        yield "rollout.top_k and rollout.val_kwargs.top_k cannot be 0: write -1 to sample from all tokens."
    if rollout.engine == "transformers" and size > 1:
        yield f"{key} is {size}, but the transformers engine holds the whole model on each rank: set it to 1."
    elif size >= 1 and world_size % size:
        yield f"{key} is {size}, which does not divide the world size {world_size}: choose a divisor of it."
    elif size >= 1 and model is not None and model.num_heads % size:
        yield f"{key} is {size}, which does not divide the model's {model.num_heads} attention heads: choose a divisor."


def _loss_problems(config: RunConfig) -> Iterator[str]:
    actor = config.actor
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor.use_kl_loss is true, but actor.kl_loss_coef is 0: set use_kl_loss to false, or give it a weight."
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"actor.loss_scale_factor is {actor.loss_scale_factor}, but actor.loss_agg_mode {actor.loss_agg_mode} does "
            "not use it: leave it out, or choose seq-mean-token-sum-norm."
        )


def _optim_problems(config: RunConfig) -> Iterator[str]:
    optim = config.optim
    if len(optim.betas) != 2:
        yield f"optim.betas has {len(optim.betas)} numbers, but AdamW has two, e.g. [0.9, 0.95]."
    if optim.min_lr > optim.lr:
        yield f"optim.min_lr {optim.min_lr} is above optim.lr {optim.lr}: the learning rate cannot decay upwards."
    if optim.min_lr > 0 and optim.lr_decay_style == "constant":
        yield (
            f"optim.min_lr is {optim.min_lr}, but optim.lr_decay_style constant never decays to it: leave it out, "
            "or choose linear or cosine."
        )


def _trainer_problems(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    for name in ("test_freq", "save_freq"):
        if getattr(trainer, name) == 0:
            yield f"trainer.{name} cannot be 0: write -1 for never in between."
    if not config.data.val_files:
        asking = [f"trainer.test_freq {trainer.test_freq}"] if trainer.test_freq > 0 else []
        asking += ["trainer.val_before_train true"] if trainer.val_before_train else []
        if asking:
            off = "trainer.val_before_train=false, trainer.test_freq=-1"
            yield f"{' and '.join(asking)} ask for evaluation, but data.val_files is empty: name files, or set {off}."
    if (trainer.resume_mode == "path") != (trainer.resume_from_path is not None):
        yield (
            f"trainer.resume_mode is {trainer.resume_mode} and trainer.resume_from_path is "
            f"{trainer.resume_from_path or 'null'}: a path is needed with resume_mode path, and only then."
        )


def _file_problems(config: RunConfig) -> Iterator[str]:
    replay = config.rollout.replay_dir if config.trainer.kind == "rl" else None
    if not config.data.train_files and replay is None:
        yield "data.train_files is empty: name at least one parquet file."
    yield from _missing("data.train_files", config.data.train_files)
    yield from _missing("data.val_files", config.data.val_files)
    yield from _missing("rollout.replay_dir", [replay])
    yield from _missing("reward.custom.path", [config.reward.custom.path])
    yield from _missing("trainer.resume_from_path", [config.trainer.resume_from_path])


def _missing(key: str, paths: Iterable[str | None]) -> Iterator[str]:
    for path in paths:
        # What is behind a URL is known when it is read: looking would need the network.
        if path is not None and "://" not in path and not Path(path).exists():
            yield f"{key}: {path} does not exist (looked for from {Path.cwd()})."
