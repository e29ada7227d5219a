"""Writes a model as a Hugging Face folder: config.json, tokenizer and safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from megarl.models.build import MegatronModel, Role
from megarl.models.scores import scoring_pad_token_id
from megarl.weights.exchange import exchange, plan_wanted
from megarl.weights.export_hf import ExportPlan, plan_export
from megarl.weights.journal import Journal
from megarl.weights.safetensors_io import TensorInfo
from megarl.weights.safetensors_write import MAX_FILE_BYTES, SafetensorsFile, plan_files, write_index
from megarl.weights.together import SharedOutcome

HF_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What travels beside the weights and config.json: tokenizer, chat template, generation settings."""

_CLASSES = {
    Role.CRITIC: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    Role.REWARD: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
"""transformers' class for each `model_type`."""


def save_hf(
    model: MegatronModel,
    folder: str | Path,
    *,
    source_folder: str | Path,
    max_file_bytes: int = MAX_FILE_BYTES,
    journal: Journal | None = None,
    progress: Callable[[int], None] | None = None,
    on_tensor: Callable[[str, torch.Tensor], None] | None = None,
) -> int:
    """Writes the model as a Hugging Face folder. Collective over the world.

    Each file has one rank that writes it (`share_files`). What is in which file does not depend on the layout.

    Args:
        folder: an existing folder on a file system that all ranks share. The caller makes it appear under its final
            name afterwards.
        source_folder: where config.json and the tokenizer are copied from.
        max_file_bytes: the largest safetensors file; a larger tensor has a file of its own.
        journal: of `folder`; files that it knows to be finished are not written again.
        progress: is told the bytes that all ranks took since the last call.
        on_tensor: is shown each tensor on one rank, for checksums; those of finished files too.

    Returns:
        The bytes of tensors that this rank wrote.

    Raises:
        ConfigError: on every rank; a rank cannot write (disk full, no permission).
    """
    folder = Path(folder)
    plan = plan_export(model)
    files = plan_files(plan.tensors, max_file_bytes)
    finished = set(journal.finished) if journal is not None else set()
    # A finished file's tensors still come by where somebody wants to see them.
    streamed = [file for file in files if on_tensor is not None or file not in finished]
    writers = dict(zip(streamed, share_files(_held_bytes(plan, [files[file] for file in streamed])), strict=True))
    by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    for file, rank in writers.items():
        by_rank[rank].extend(files[file])
    wanted = plan_wanted(plan, by_rank)

    outcome = SharedOutcome()
    with outcome.attempt(folder):
        if dist.get_rank() == 0:
            copy_hf_files(source_folder, folder)
            _write_config(model, Path(source_folder), folder)
            write_index(folder, files, plan.tensors)
    outcome.check()
    mine = {file: files[file] for file, rank in writers.items() if rank == dist.get_rank() and file not in finished}
    series = _FileSeries(folder, mine, plan.tensors, journal)
    try:
        for tensors in exchange(plan, wanted, progress):
            with outcome.attempt(folder):
                for name, tensor in tensors:
                    series.write(name, tensor)
                    if on_tensor is not None:
                        on_tensor(name, tensor)
            outcome.check()
    except BaseException:
        series.abandon()
        raise
    return series.num_bytes


class _FileSeries:
    """The files that this rank writes, one after another."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Sequence[str]],
        tensors: Mapping[str, TensorInfo],
        journal: Journal | None,
    ) -> None:
        self._folder, self._files, self._tensors, self._journal = folder, files, tensors, journal
        self._starts = {names[0]: file for file, names in files.items()}
        self._ends = {names[-1]: file for file, names in files.items()}
        self._names = {name for names in files.values() for name in names}
        self._current: SafetensorsFile | None = None
        self.num_bytes = 0
        """Written so far."""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the tensor, if it is of one of the files; their tensors have to come in their order."""
        if name not in self._names:
            return
        if name in self._starts:
            path = self._folder / self._starts[name]
            self._current = SafetensorsFile(path, {n: self._tensors[n] for n in self._files[path.name]})
        assert self._current is not None
        self._current.write(name, tensor)
        self.num_bytes += tensor.nbytes
        if name in self._ends:
            self._current.finish()
            self._current = None
            if self._journal is not None:
                self._journal.record(self._folder / self._ends[name])

    def abandon(self) -> None:
        """Removes the file that is not finished."""
        if self._current is not None:
            self._current.abandon()


def share_files(held: Sequence[Sequence[int]]) -> list[int]:
    """Chooses the rank that writes each file: the one that holds most of it, of those whose share is not full.

    Every rank writes ⌈files / ranks⌉ files or fewer. Where several hold as much, it is the one with the fewest files
    so far. Pure.

    Args:
        held: for each file the bytes of it that each rank holds.
    """
    if not held:
        return []
    num_ranks = len(held[0])
    share = -(-len(held) // num_ranks)
    counts = [0] * num_ranks
    writers = []
    for by_rank in held:
        free = (rank for rank in range(num_ranks) if counts[rank] < share)
        writer = max(free, key=lambda rank: (by_rank[rank], -counts[rank], -rank))
        counts[writer] += 1
        writers.append(writer)
    return writers


def _held_bytes(plan: ExportPlan, files: Sequence[Sequence[str]]) -> list[list[int]]:
    """[files][ranks]: what each rank holds of each file. Collective over the world."""
    mine = [
        sum(piece.numel * plan.tensors[name].dtype.itemsize for name in names for _, piece in plan.mine.get(name, ()))
        for names in files
    ]
    gathered: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    return [list(by_rank) for by_rank in zip(*gathered, strict=True)]


def copy_hf_files(source: str | Path, target: str | Path) -> list[str]:
    """Copies the files of `HF_FILES` that `source` has; returns their names."""
    copied = [name for name in HF_FILES if (Path(source) / name).exists()]
    for name in copied:
        shutil.copyfile(Path(source) / name, Path(target) / name)
    return copied


def _write_config(model: MegatronModel, source: Path, target: Path) -> None:
    """config.json as it was, but for what the model no longer is: its dtype and, with a scalar head, its class; 8-bit
    weights and layers of multi-token prediction, which are not loaded.

    The file's own text is the base, not a config object: transformers would fill in and rename keys.
    """
    config = json.loads((source / "config.json").read_text())
    dtype_key = "dtype" if "dtype" in config else "torch_dtype"
    config[dtype_key] = str(model.dtype).removeprefix("torch.")
    config.pop("quantization_config", None)
    if config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0
    if model.role is not Role.CAUSAL_LM:
        family = model.hf_config.model_type
        # glm4_moe has no classifiers in transformers; its folder loads there as the bare model, and here whole.
        config["architectures"] = [_CLASSES[model.role].get(family) or MODEL_MAPPING_NAMES[family]]
        config["num_labels"] = 1
        config["id2label"] = {"0": "LABEL_0"}
        config["label2id"] = {"LABEL_0": 0}
        # A critic has a bias, which is what transformers takes an absent key for.
        config.pop("token_classification_bias", None)
    if model.role is Role.REWARD:
        config["pad_token_id"] = scoring_pad_token_id(source)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
