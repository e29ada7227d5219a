"""Every rule between the settings of a run, in one pass that reports all problems at once. Imports no torch."""

import math
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megarl.config.batches import BatchPlan
from megarl.config.errors import ConfigError
from megarl.config.fields import Key, config_keys
from megarl.config.model_shape import EXPERT_BIAS_MODEL_TYPES, ModelShape
from megarl.config.schema import RunConfig
from megarl.config.schema_learning import OptimConfig
from megarl.config.validate_checkpoint import checkpoint_problems
from megarl.config.validate_guard import guard_problems
from megarl.config.validate_observe import missing_tracker_settings, observe_problems
from megarl.config.validate_preference import preference_problems
from megarl.config.validate_rl import engine_problems, rl_problems
from megarl.config.validate_supervised import SUPERVISED_KINDS, supervised_problems

EXTENSIBLE = ("algorithm.adv_estimator", "actor.policy_loss", "preference.loss_type")
"""Names that files of `algorithm.plugins` add to."""

_TRACKER_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "prometheus": "prometheus_client"}
"""What imports as what."""


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
    problems += _router_problems(config, model)
    problems += _parallel_switch_problems(config)
    problems += _trainer_problems(config)
    problems += checkpoint_problems(config)
    problems += _optim_problems("optim", config.optim)
    problems += _optim_problems("critic.optim", config.critic.optim)
    problems += observe_problems(config, world_size)
    problems += supervised_problems(config, layout)
    problems += guard_problems(config)
    if config.trainer.kind == "preference":
        problems += preference_problems(config, layout, model)
    # Also where the kind itself is wrong: the rest should be reported with it.
    if config.trainer.kind not in SUPERVISED_KINDS:
        problems += rl_problems(config, layout, model)
    problems += _file_problems(config)
    return problems


def validate_server(config: RunConfig) -> list[str]:
    """Everything that is wrong with a config for one of its `rollout.servers`: one sentence each, with the key.

    Its machine needs no data, and does not know how many ranks the run has.
    """
    servers = len(config.rollout.servers)
    if not servers:
        return ["rollout.servers names none: write host:port of each engine that has GPUs of its own."]
    model, model_problems = _read_model(config)
    return [
        *_value_problems(config),
        *model_problems,
        *_length_problems(config, model),
        *engine_problems(config, servers, model),
    ]


def missing_packages(config: RunConfig) -> list[str]:
    """What the config needs and this machine's environment lacks, one sentence each."""
    generates = config.trainer.kind == "rl" or (config.trainer.kind == "preference" and config.preference.rounds > 0)
    needed = {
        "sglang": (
            generates and config.rollout.engine == "sglang" and not config.rollout.servers,
            "rollout.engine is sglang",
            "sglang",
        ),
        "transformer_engine": (config.model.backend == "te", "model.backend is te", "gpu"),
        **{
            package: (name in config.trainer.logger, f"trainer.logger names {name}", "trackers")
            for name, package in _TRACKER_PACKAGES.items()
        },
    }
    packages = [
        f"{reason}, but the package {package} is not installed: pip install 'megarl[{extra}]', or choose another."
        for package, (is_needed, reason, extra) in needed.items()
        if is_needed and find_spec(package) is None
    ]
    return [*packages, *missing_tracker_settings(config)]


def _value_problems(config: RunConfig) -> Iterator[str]:
    """Values that their own field does not allow."""
    values = OmegaConf.structured(config)
    for key in config_keys(RunConfig):
        if key.name in EXTENSIBLE and config.algorithm.plugins:
            continue  # what the files register is known when they are imported
        value = OmegaConf.select(values, key.name)
        if key.entry_class is not None:
            yield from _entry_problems(key, value)
            continue
        for item in value if OmegaConf.is_list(value) else [value]:
            if item is not None and (rule := _broken_rule(key, item)):
                yield f"{key.name} is {item!r}, but must be {rule}."


def _entry_problems(key: Key, entries: Iterable[Any]) -> Iterator[str]:
    """Values of the entries of a list of settings that their own field does not allow."""
    for number, entry in enumerate(entries):
        for part in key.entry_keys(number):
            value = entry[part.name.rpartition(".")[2]]
            if value is not None and (rule := _broken_rule(part, value)):
                yield f"{part.name} is {value!r}, but must be {rule}."


def _broken_rule(key: Key, value: Any) -> str | None:
    rules = key.rules
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
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


def _router_problems(config: RunConfig, model: ModelShape | None) -> Iterator[str]:
    rate = config.model.moe_router_bias_update_rate
    if model is not None and rate > 0 and model.model_type not in EXPERT_BIAS_MODEL_TYPES:
        yield (
            f"model.moe_router_bias_update_rate is {rate}, but a {model.model_type} model has no expert bias "
            f"(only {', '.join(EXPERT_BIAS_MODEL_TYPES)} have): leave it out."
        )
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        weight = getattr(config.model, name)
        if model is not None and weight > 0 and not model.is_moe:
            yield f"model.{name} is {weight}, but a {model.model_type} model has no routers: leave it out."


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


def _optim_problems(section: str, optim: OptimConfig) -> Iterator[str]:
    if len(optim.betas) != 2:
        yield f"{section}.betas has {len(optim.betas)} numbers, but AdamW has two, e.g. [0.9, 0.95]."
    if any(beta == 1 for beta in optim.betas):
        yield f"{section}.betas has a 1, with which AdamW never moves: both must be below 1, e.g. [0.9, 0.95]."
    if optim.min_lr > optim.lr:
        yield (
            f"{section}.min_lr {optim.min_lr} is above {section}.lr {optim.lr}: the learning rate cannot decay upwards."
        )
    if optim.min_lr > 0 and optim.lr_decay_style == "constant":
        yield (
            f"{section}.min_lr is {optim.min_lr}, but {section}.lr_decay_style constant never decays to it: leave it "
            "out, or choose linear, cosine or wsd."
        )
    if optim.lr_wsd_decay_steps is not None and optim.lr_decay_style != "wsd":
        yield (
            f"{section}.lr_wsd_decay_steps is {optim.lr_wsd_decay_steps}, but {section}.lr_decay_style is "
            f"{optim.lr_decay_style}: leave it out, or choose wsd."
        )


def _trainer_problems(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if not -(2**63) <= trainer.seed < 2**63:
        yield f"trainer.seed is {trainer.seed}, but must fit into 64 bits: take a smaller number."
    for name in ("test_freq", "save_freq"):
        if getattr(trainer, name) == 0:
            yield f"trainer.{name} cannot be 0: write -1 for never in between."
    if not config.data.val_files:
        asking = [f"trainer.test_freq {trainer.test_freq}"] if trainer.test_freq > 0 else []
        asking += ["trainer.val_before_train true"] if trainer.val_before_train else []
        if asking:
            off = "trainer.val_before_train=false, trainer.test_freq=-1"
            ask = "asks" if len(asking) == 1 else "ask"
            yield f"{' and '.join(asking)} {ask} for evaluation, but data.val_files is empty: name files, or set {off}."
    if (trainer.resume_mode == "path") != (trainer.resume_from_path is not None):
        yield (
            f"trainer.resume_mode is {trainer.resume_mode} and trainer.resume_from_path is "
            f"{trainer.resume_from_path or 'null'}: a path is needed with resume_mode path, and only then."
        )
    if trainer.resume_with_other_data and trainer.total_training_steps is None:
        yield (
            "trainer.resume_with_other_data is true, but trainer.total_training_steps is null, and epochs of other "
            "rows do not say how many steps that makes: set it, the steps so far included."
        )


def _file_problems(config: RunConfig) -> Iterator[str]:
    replay = config.rollout.replay_dir if config.trainer.kind == "rl" else None
    if not config.data.train_files and replay is None:
        yield "data.train_files is empty: name at least one parquet file."
    yield from _missing("data.train_files", config.data.train_files)
    yield from _missing("data.val_files", config.data.val_files)
    yield from _missing("rollout.replay_dir", [replay])
    yield from _missing("reward.custom.path", [config.reward.custom.path])
    yield from _missing("reward.model.path", [config.reward.model.path])
    yield from _missing("critic.path", [config.critic.path])
    yield from _missing("reward_model.teacher", [config.reward_model.teacher])
    yield from _missing("algorithm.plugins", config.algorithm.plugins)
    yield from _missing("trainer.resume_from_path", [config.trainer.resume_from_path])


def _missing(key: str, paths: Iterable[str | None]) -> Iterator[str]:
    for path in paths:
        # What is behind a URL is known when it is read: looking would need the network.
        if path is not None and "://" not in path and not Path(path).exists():
            yield f"{key}: {path} does not exist (looked for from {Path.cwd()})."
