"""Fills a model from a Hugging Face folder: each rank reads its own boxes of each tensor, and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import platform
from megarl.config.errors import ConfigError
from megarl.models.build import MegatronModel, Role
from megarl.weights.boxes import box_index
from megarl.weights.geometry import Piece
from megarl.weights.pieces import Shard, model_shards
from megarl.weights.safetensors_io import SafetensorsReader
from megarl.weights.together import SharedOutcome, raise_together

Progress = Callable[[int], None]
"""Is told the bytes of parameters that were filled since the last call."""

_HEAD_WEIGHT, _HEAD_BIAS = "score.weight", "score.bias"
_SCALAR_HEAD = (_HEAD_WEIGHT, _HEAD_BIAS)
"""transformers' names of the head, in its sequence and its token classifiers of all supported families."""

_LARGEST_LIST = 5
"""How many tensor names an error lists."""


def load_hf(
    model: MegatronModel,
    folder: str | Path,
    progress: Progress | None = None,
    *,
    head_seed: int = 0,
    needs_head: bool = False,
) -> None:
    """Copies the weights of a Hugging Face folder into `model`, cast to the model's dtype. Collective over the world.

    A critic or reward model comes from a language model, a sequence classifier or a token classifier. A scalar head
    that the folder has is read; a new one is the same on every rank and in every layout (`_fill_new_head`). Everything
    else must be there, in the right shape, and every tensor of the folder must have a place.

    Args:
        progress: is told the bytes of parameters that were filled since the last call.
        head_seed: of the weights of a new reward head.
        needs_head: refuse a folder without a scalar head, whose scores would be those of a new one: for a model that is
            to judge and not to learn.

    Raises:
        ConfigError: on every rank, if any rank found something wrong; the message is the first such rank's.
    """
    source = HfSource(model, folder, head_seed=head_seed, needs_head=needs_head)
    outcome = SharedOutcome()
    with outcome.attempt(folder):
        for shard in source.shards:
            source.fill(shard)
            if progress is not None:
                progress(shard.tensor.nbytes)
    outcome.check()


class HfSource:
    """A Hugging Face folder that fits a model, to fill its parameters from in any order."""

    def __init__(
        self, model: MegatronModel, folder: str | Path, *, head_seed: int = 0, needs_head: bool = False
    ) -> None:
        """Reads the headers and compares them with the model; `load_hf` says with what result. Collective."""
        self._model, self._head_seed = model, head_seed
        self.shards: list[Shard] = []
        outcome = SharedOutcome()
        with outcome.attempt(folder):
            self._reader = SafetensorsReader(folder)
            self.shards = model_shards(model)
            _check_tensors(self._reader, self.shards, needs_head)
        outcome.check()
        raise_together(_unclaimed(model, self._reader, self.shards))
        self._unfilled = {shard.tensor.untyped_storage().data_ptr(): shard for shard in self.shards}

    def fill(self, shard: Shard) -> None:
        """Fills one parameter.

        Raises:
            OSError: a file cannot be read.
        """
        _fill(shard, self._reader)
        _fill_new_head(self._model, shard, self._reader, self._head_seed)

    def fill_before_use(self, tensor: torch.Tensor) -> None:
        """Fills the parameter of this rank that `tensor` is part of, unless this was done.

        Raises:
            OSError: a file cannot be read.
        """
        shard = self._unfilled.pop(tensor.untyped_storage().data_ptr(), None)
        if shard is not None:
            self.fill(shard)


def _check_tensors(reader: SafetensorsReader, shards: Sequence[Shard], needs_head: bool) -> None:
    has_place = any(piece.hf_name == _HEAD_WEIGHT for shard in shards for piece in shard.pieces)
    if needs_head and has_place and _HEAD_WEIGHT not in reader:
        raise ConfigError(
            f"{reader.folder} has no {_HEAD_WEIGHT}, so it is no reward model and its scores would be random; give one "
            "that was trained, such as trainer.kind reward_model exports"
        )
    pieces = [piece for shard in shards for piece in shard.pieces if _is_required(piece, reader)]
    missing = sorted({piece.hf_name for piece in pieces if piece.hf_name not in reader})
    if missing:
        raise ConfigError(f"{reader.folder} lacks {_listed(missing)}, which config.json implies; copy the model again")
    for piece in pieces:
        found = reader.info(piece.hf_name).shape
        if piece.hf_name in _SCALAR_HEAD and found[0] != piece.hf_shape[0]:
            raise ConfigError(
                f"{reader.file_of(piece.hf_name)}: the model has {found[0]} labels (tensor {piece.hf_name} has shape "
                f"{list(found)}), but a reward model or critic has one score; use a model with num_labels 1"
            )
        if found != piece.hf_shape:
            raise ConfigError(
                f"{reader.file_of(piece.hf_name)}: tensor {piece.hf_name} has shape {list(found)}, but config.json "
                f"implies {list(piece.hf_shape)}; config.json and weights are not of one model"
            )


def _is_required(piece: Piece, reader: SafetensorsReader) -> bool:
    return piece.hf_name not in _SCALAR_HEAD or piece.hf_name in reader


def _fill(shard: Shard, reader: SafetensorsReader) -> None:
    if shard.padding:
        shard.tensor.zero_()
    for piece in shard.pieces:
        if not piece.numel or piece.hf_name not in reader:
            continue
        source = reader.read(piece.hf_name, piece.hf_box)
        shard.tensor[box_index(piece.local_box)].copy_(source)


def _fill_new_head(model: MegatronModel, shard: Shard, reader: SafetensorsReader, seed: int) -> None:
    """Gives a scalar head its first weights, where the folder has none.

    A critic's are 0: before it has learned anything it then expects nothing, and the first advantages are the rewards
    themselves. Random values would be noise in them, which GAE adds up along the response. Its gradient is not 0, since
    it is the hidden state times the error. A reward model's are drawn from N(0, 1/(hidden size + 1)), which keeps first
    scores near 0 whatever the size (arXiv:2009.01325): with 0 the layers below would not learn in the first step.
    """
    (name, *others) = {piece.hf_name for piece in shard.pieces}
    if others or name not in _SCALAR_HEAD or name in reader:
        return
    if name == _HEAD_BIAS or model.role is Role.CRITIC:
        shard.tensor.zero_()
        return
    # On the CPU and in float32, so that device and dtype do not change what is drawn.
    generator = torch.Generator().manual_seed(seed)
    scale = 1.0 / math.sqrt(model.hf_config.hidden_size + 1)
    shard.tensor.copy_(torch.randn(shard.tensor.shape, generator=generator) * scale)


def _unclaimed(model: MegatronModel, reader: SafetensorsReader, shards: Iterable[Shard]) -> str | None:
    """Says which tensors no rank has a place for: a bias, say, that the model was built without."""
    names = reader.names()
    claimed = {piece.hf_name for shard in shards for piece in shard.pieces}
    flags = torch.tensor([name in claimed for name in names], dtype=torch.uint8, device=platform.current().device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    left = [
        name for name, flag in zip(names, flags.tolist(), strict=True) if not flag and not _may_be_left(model, name)
    ]
    if not left:
        return None
    return (
        f"{reader.folder} has {_listed(left)}, for which a {model.hf_config.model_type} {model.role} model has no "
        "place; loading it without them would change what it computes"
    )


def _may_be_left(model: MegatronModel, name: str) -> bool:
    if _is_of_prediction_layer(model, name):
        return True  # multi-token prediction (arXiv:2412.19437, section 2.2) drafts tokens; the model does not need it
    if name.endswith("rotary_emb.inv_freq"):
        return True  # saved by old versions of transformers; derived from the config
    is_lm_head = name == "lm_head.weight"
    is_score = name in _SCALAR_HEAD
    return (is_lm_head and (model.role is not Role.CAUSAL_LM or model.tied)) or (
        is_score and model.role is Role.CAUSAL_LM
    )


def _is_of_prediction_layer(model: MegatronModel, name: str) -> bool:
    """Whether a tensor belongs to one of the layers that deepseek_v3 and glm4_moe number after the model's last."""
    number = re.match(r"model\.layers\.(\d+)\.", name)
    extra = getattr(model.hf_config, "num_nextn_predict_layers", 0) or 0
    last = model.hf_config.num_hidden_layers
    return number is not None and last <= int(number.group(1)) < last + extra


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_LARGEST_LIST])
    return shown if len(names) <= _LARGEST_LIST else f"{shown} and {len(names) - _LARGEST_LIST} more tensors"
