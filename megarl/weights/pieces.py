"""Which box of which Hugging Face tensor goes where in each Megatron parameter of this rank: the name map.

Loading, export and sync are walks over these pieces, and completeness is a property of them: the pieces of all ranks of
one model copy cover every tensor exactly once. mbridge gives the names, `geometry` the boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megarl.models.build import MegatronModel, Role
from megarl.weights.geometry import Cut, Piece, parameter_pieces


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter of this rank and the pieces it is made of."""

    name: str
    """Megatron-Core's name, with global layer and expert numbers."""
    tensor: torch.Tensor
    pieces: tuple[Piece, ...]
    is_copy: bool
    """A tied output layer on the last stage: loaded like the embedding, exported from there only."""

    @property
    def padding(self) -> int:
        """Elements that no tensor fills: rows that pad the vocabulary."""
        return self.tensor.numel() - sum(piece.numel for piece in self.pieces)


def model_shards(model: MegatronModel) -> list[Shard]:
    """The shards of this rank, in the order of its chunks' parameters.

    Raises:
        NotImplementedError: a parameter that the name map does not know.
    """
    shards = []
    for chunk in model.chunks:
        names = model.bridge._weight_name_mapping_mcore_local_to_global(chunk)
        parameters = dict(chunk.named_parameters())
        # The router's expert bias is a buffer that is part of the model.
        buffers = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")}
        for local_name, tensor in {**parameters, **buffers}.items():
            if tensor is None:
                continue
            name = names[local_name]
            pieces = parameter_pieces(
                name,
                _hf_names(model, name),
                tuple(tensor.shape),
                _cut(model, name, tensor),
                vocab_size=model.vocab_size,
                query_heads=model.config.num_attention_heads,
                groups=model.config.num_query_groups,
            )
            is_copy = model.tied and name == "output_layer.weight"
            shards.append(Shard(name=name, tensor=tensor.data, pieces=tuple(pieces), is_copy=is_copy))
    return shards


def _hf_names(model: MegatronModel, name: str) -> list[str]:
    if model.role is not Role.CAUSAL_LM and name.startswith("output_layer."):
        return [name.replace("output_layer", "score")]
    return model.bridge._weight_name_mapping_mcore_to_hf(name)


def _cut(model: MegatronModel, name: str, tensor: torch.Tensor) -> Cut:
    groups = model.groups
    group = groups.etp if ".mlp.experts." in name else groups.tp
    is_cut = getattr(tensor, "tensor_model_parallel", False) and group.size() > 1
    return Cut(rank=group.rank(), size=group.size(), dim=tensor.partition_dim if is_cut else None)  # type: ignore[attr-defined]


def pieces_by_tensor(shards: Iterable[Shard]) -> Mapping[str, list[tuple[Shard, Piece]]]:
    """The pieces that this rank exports, under their tensor's name, in the order of `shards`."""
    found: dict[str, list[tuple[Shard, Piece]]] = {}
    for shard in shards:
        if shard.is_copy:
            continue
        for piece in shard.pieces:
            if piece.numel:
                found.setdefault(piece.hf_name, []).append((shard, piece))
    return found
