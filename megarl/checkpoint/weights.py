"""Checkpoints of a model's weights, which load in any layout.

<checkpoint>/
  megarl.json    what it is (`manifest`)
  hf/            config.json, tokenizer, chat template, generation settings
  weights/       a Megatron dist_checkpoint (`dist_format`)
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

import megarl
from megarl.checkpoint.dist_format import read_tensors
from megarl.checkpoint.in_process_save import WriteOptions, write_tensors
from megarl.checkpoint.manifest import HF_FOLDER, WEIGHTS_FOLDER, Manifest, layout_record, read_manifest
from megarl.checkpoint.publish import publish
from megarl.config.errors import ConfigError
from megarl.config.model_shape import ModelShape
from megarl.models.build import MegatronModel, Role, build_model
from megarl.parallel.groups import Groups
from megarl.weights.export_hf import plan_export
from megarl.weights.save_hf import copy_hf_files
from megarl.weights.together import SharedOutcome, raise_together


def build_to_fill(hf_config: PretrainedConfig, groups: Groups, *, role: Role, dtype: torch.dtype) -> MegatronModel:
    """This rank's part of a model, whose parameters take no memory until they are filled.

    With `use_cpu_initialization` Megatron-Core first makes every weight whole, in float32, on every rank.
    """
    return build_model(hf_config, groups, role=role, dtype=dtype, overrides={"use_cpu_initialization": False})


def save_weights(model: MegatronModel, folder: str | Path, source_hf: str | Path) -> None:
    """Writes a checkpoint, which appears under its name when it is complete. Collective over the world.

    Args:
        folder: must not exist; on a file system that all ranks share.
        source_hf: the Hugging Face folder whose config.json and tokenizer go along.

    Raises:
        ConfigError: on every rank; the folder exists, or it cannot be written.
    """
    with publish(folder) as temporary:
        write_weights(model, temporary, source_hf)


def write_weights(
    model: MegatronModel, folder: Path, source_hf: str | Path, options: WriteOptions | None = None
) -> int:
    """Writes a checkpoint into an existing folder that is not published yet. Collective over the world.

    Returns:
        The bytes of weights that this rank wrote.

    Raises:
        ConfigError: on every rank; it cannot be written, or `options.fill` found something wrong.
    """
    describe_weights(model, folder, source_hf)
    return write_tensors(model, folder / WEIGHTS_FOLDER, options)


def describe_weights(model: MegatronModel, folder: Path, source_hf: str | Path) -> None:
    """Writes all of a checkpoint but the tensors, for which it leaves an empty folder. Collective over the world.

    Raises:
        ConfigError: on every rank; it cannot be written.
    """
    tensors = plan_export(model).tensors.values()
    manifest = Manifest(
        megarl_version=megarl.__version__,
        role=str(model.role),
        dtype=str(model.dtype).removeprefix("torch."),
        model_type=model.hf_config.model_type,
        num_parameters=sum(tensor.num_elements for tensor in tensors),
        layout=layout_record(model.groups.layout),
    )
    outcome = SharedOutcome()
    with outcome.attempt(folder):
        if dist.get_rank() == 0:
            (folder / WEIGHTS_FOLDER).mkdir(exist_ok=True)
            (folder / HF_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(Path(source_hf) / "config.json", folder / HF_FOLDER / "config.json")
            copy_hf_files(source_hf, folder / HF_FOLDER)
            manifest.write(folder)
    outcome.check()


def load_weights(model: MegatronModel, folder: str | Path) -> None:
    """Fills a model of any layout from a checkpoint, cast to the model's dtype. Collective over the world.

    Raises:
        ConfigError: on every rank; not a checkpoint, a damaged one, or one of another model or role.
    """
    problem = None
    try:
        problem = _other_model(model, Path(folder))
    except ConfigError as error:
        problem = str(error)
    raise_together(problem)
    read_tensors(model, Path(folder) / WEIGHTS_FOLDER)


def _other_model(model: MegatronModel, folder: Path) -> str | None:
    """Says how the checkpoint is not this model's, as far as its names and shapes would not show it."""
    manifest = read_manifest(folder)
    vocab_size = ModelShape.from_hf(folder / HF_FOLDER).vocab_size
    for what, stored, wanted in (
        ("model_type", manifest.model_type, model.hf_config.model_type),
        ("role", manifest.role, str(model.role)),
        ("vocab_size", vocab_size, model.vocab_size),
    ):
        if stored != wanted:
            return f"{folder} is a checkpoint of another model: its {what} is {stored}, here it is {wanted}"
    return None
