"""Streams a model's weights as whole Hugging Face tensors, and writes them as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from megarl import platform
from megarl.models.build import MegatronModel, Role
from megarl.models.scores import scoring_pad_token_id
from megarl.weights.boxes import Box, box_index
from megarl.weights.pieces import Piece, Shard, model_shards, pieces_by_tensor, uncovered
from megarl.weights.safetensors_io import SafetensorsWriter, TensorInfo
from megarl.weights.together import SharedOutcome


@dataclass(frozen=True, slots=True)
class _Source:
    """Where one box of a tensor comes from."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Which rank gives which box of which tensor; the same on every rank. Made once for a model."""

    tensors: dict[str, TensorInfo]
    """In the order of the stream."""
    sources: dict[str, tuple[_Source, ...]]
    mine: dict[str, list[tuple[Shard, Piece]]]
    """What this rank could give."""


def plan_export(model: MegatronModel) -> ExportPlan:
    """Agrees on the plan. Collective over the world.

    Raises:
        RuntimeError: the pieces of all ranks do not cover a tensor exactly once, which would be an error in the map.
    """
    mine = pieces_by_tensor(model_shards(model))
    offer = {
        name: (pieces[0][1].hf_shape, pieces[0][0].tensor.dtype, [piece.hf_box for _, piece in pieces])
        for name, pieces in mine.items()
    }
    offers: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(offers, offer)
    tensors: dict[str, TensorInfo] = {}
    sources: dict[str, dict[Box, _Source]] = {}
    for rank, ranks_offer in enumerate(offers):
        for name, (shape, dtype, boxes) in ranks_offer.items():
            tensors.setdefault(name, TensorInfo(shape, dtype))
            for box in boxes:
                # Replicas offer the same boxes; the lowest rank gives them.
                sources.setdefault(name, {}).setdefault(box, _Source(rank, box))
    for name, by_box in sources.items():
        problem = uncovered(tensors[name].shape, list(by_box))
        if problem:
            raise RuntimeError(f"the layout's shards do not make up {name}: {problem}")
    order = sorted(tensors, key=_natural_key)
    return ExportPlan(
        {name: tensors[name] for name in order}, {name: tuple(sources[name].values()) for name in order}, mine
    )


def export_hf(
    model: MegatronModel,
    plan: ExportPlan | None = None,
    *,
    names: Iterable[str] | None = None,
    to_rank: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Streams (name, whole tensor) in the plan's order. Collective over the world: every rank must exhaust it.

    Args:
        names: the tensors to stream, the same on every rank. None: all.
        to_rank: the only rank that gets tensors; the others get nothing and only give. None: every rank gets all.

    Yields:
        A tensor that is overwritten when the next one is asked for: copy it to keep it. At any time a rank
        holds one whole tensor besides its shard.
    """
    plan = plan or plan_export(model)
    rank = dist.get_rank()
    names = list(plan.tensors if names is None else names)
    # One piece of memory for all tensors: new pages for each would cost as much as filling them.
    receives = to_rank is None or rank == to_rank
    largest = max((plan.tensors[name].num_bytes for name in names), default=0) if receives else 0
    scratch = torch.empty(largest, dtype=torch.uint8, device=platform.current().device)
    for name in names:
        info = plan.tensors[name]
        sources = plan.sources[name]
        pieces = {piece.hf_box: (shard, piece) for shard, piece in plan.mine.get(name, ())}
        whole = _whole_parameter(info, sources, pieces, rank) if receives and dist.get_world_size() == 1 else None
        if whole is None and receives:
            whole = scratch[: info.num_bytes].view(info.dtype).view(info.shape)
        for source in sources:
            _move(source, pieces, whole, rank, to_rank)
        if receives:
            assert whole is not None
            yield name, whole


def _whole_parameter(
    info: TensorInfo, sources: tuple[_Source, ...], pieces: dict[Box, tuple[Shard, Piece]], rank: int
) -> torch.Tensor | None:
    """The parameter's own rows, where they are the whole tensor and no copy is needed."""
    if len(sources) != 1:
        return None
    shard, piece = pieces[sources[0].box]
    view = shard.tensor[box_index(piece.local_box)]
    return view if tuple(view.shape) == info.shape else None


def _move(
    source: _Source,
    pieces: dict[Box, tuple[Shard, Piece]],
    whole: torch.Tensor | None,
    rank: int,
    to_rank: int | None,
) -> None:
    """Brings one box from its source into `whole` on the ranks that receive."""
    target = None if whole is None else whole[box_index(source.box)]
    held = None
    if rank == source.rank:
        shard, piece = pieces[source.box]
        held = shard.tensor[box_index(piece.local_box)]
        if target is not None and target.data_ptr() != held.data_ptr():
            target.copy_(held)
    if dist.get_world_size() == 1 or (to_rank is not None and to_rank == source.rank):
        return
    if to_rank is not None and rank not in (to_rank, source.rank):
        return
    # Collectives want contiguous memory; a box of columns is not.
    if held is not None:
        buffer = held.contiguous()
    else:
        assert target is not None
        buffer = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    if to_rank is None:
        dist.broadcast(buffer, src=source.rank)
    elif rank == source.rank:
        dist.send(buffer, dst=to_rank)
    else:
        dist.recv(buffer, src=source.rank)
    if held is None and target is not None and buffer.data_ptr() != target.data_ptr():
        target.copy_(buffer)


def _natural_key(name: str) -> tuple:
    """Sorts layer 10 after layer 9, as the files of most models are."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))


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

_BATCH_BYTES = 2**30
"""How much the other ranks may still send after rank 0 could not write: they are told in between."""

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
    progress: Callable[[int], None] | None = None,
    on_tensor: Callable[[str, torch.Tensor], None] | None = None,
) -> None:
    """Writes the model as a Hugging Face folder. Collective over the world; rank 0 writes.

    Args:
        folder: an existing, empty folder. The caller makes it appear under its final name afterwards.
        source_folder: where config.json and the tokenizer are copied from.
        progress: is told the bytes that were written since the last call.
        on_tensor: is shown each tensor on rank 0 as it is written, for checksums.

    Raises:
        ConfigError: on every rank; rank 0 cannot write (disk full, no permission).
    """
    plan = plan_export(model)
    outcome = SharedOutcome()
    writer: SafetensorsWriter | None = None
    with outcome.attempt(folder):
        if dist.get_rank() == 0:
            copy_hf_files(source_folder, folder)
            _write_config(model, Path(source_folder), Path(folder))
            writer = SafetensorsWriter(folder, plan.tensors)
    outcome.check()
    for names in _batches(plan.tensors):
        for name, tensor in export_hf(model, plan, names=names, to_rank=0):
            if outcome.problem is not None:
                continue  # the others still send
            with outcome.attempt(folder):
                writer.write(name, tensor)  # type: ignore[union-attr]
            if on_tensor is not None:
                on_tensor(name, tensor)
            if progress is not None:
                progress(tensor.nbytes)
        outcome.check()
    with outcome.attempt(folder):
        if writer is not None:
            writer.finish()
    outcome.check()


def _batches(tensors: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """Names in batches of at most `_BATCH_BYTES`, or of one tensor."""
    batch: list[str] = []
    size = 0
    for name, info in tensors.items():
        if batch and size + info.num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += info.num_bytes
    if batch:
        yield batch


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
