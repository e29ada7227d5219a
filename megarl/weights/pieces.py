"""Which box of which Hugging Face tensor goes where in each Megatron parameter: the name map, with geometry.

Loading, export and sync are walks over these pieces, and completeness is a property of them: the pieces of all ranks of
one model copy cover every tensor exactly once. mbridge gives the names; the geometry is Megatron-Core's:

- `linear_qkv`: for each key-value group its query heads, then its key head, then its value head, along rows; tensor
  parallelism cuts the rows (also inside a group, when there are more ranks than groups).
- `linear_fc1` of a gated unit: this rank's rows of the gate above this rank's rows of the up projection.
- vocabulary: rows, padded at the end to a multiple of the ranks.
- everything else: cut along the parameter's `partition_dim`, or whole on every rank.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.models.build import MegatronModel, Role
from megarl.weights.boxes import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """One box that a Megatron parameter shard and a Hugging Face tensor have in common."""

    hf_name: str
    hf_shape: tuple[int, ...]
    """Of the whole tensor."""
    hf_box: Box
    local_box: Box
    """In the parameter shard; the same size as `hf_box`."""

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.hf_box)


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


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is shared out."""

    rank: int
    size: int
    dim: int | None
    """The dimension that is cut; None: every rank has it whole."""


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


def parameter_pieces(
    name: str,
    hf_names: Sequence[str],
    shape: tuple[int, ...],
    cut: Cut,
    *,
    vocab_size: int,
    query_heads: int,
    groups: int,
) -> list[Piece]:
    """The pieces of one parameter shard. Pure arithmetic: no tensors, no processes.

    Args:
        name: Megatron-Core's name.
        hf_names: the tensors it is made of: query, key and value, or gate and up, or one.
        shape: of the shard.
        vocab_size: rows of embedding and output layer before padding.
        query_heads, groups: attention heads and key-value groups of the whole model.
    """
    if len(hf_names) == 3:
        return _qkv_pieces(hf_names, shape, cut, query_heads, groups)
    if len(hf_names) == 2:
        return _gated_pieces(hf_names, shape, cut)
    rows = vocab_size if re.fullmatch(r"(embedding\.word_embeddings|output_layer)\.weight", name) else None
    is_scalar_head = hf_names[0].startswith("score.")
    return [_plain_piece(hf_names[0], shape, cut, None if is_scalar_head else rows)]


def _qkv_pieces(
    hf_names: Sequence[str], shape: tuple[int, ...], cut: Cut, query_heads: int, groups: int
) -> list[Piece]:
    total_rows = shape[0] * (cut.size if cut.dim is not None else 1)
    head = total_rows // (query_heads + 2 * groups)
    queries = query_heads // groups * head
    # (tensor, rows in one group) in the order they lie within a group
    parts = list(zip(hf_names, (queries, head, head), strict=True))
    first = cut.rank * shape[0] if cut.dim is not None else 0
    pieces, row = [], 0
    for group in range(groups):
        for hf_name, rows in parts:
            start, stop = max(row, first), min(row + rows, first + shape[0])
            if start < stop:
                offset = group * rows - row
                pieces.append(
                    Piece(
                        hf_name,
                        (rows * groups, *shape[1:]),
                        ((start + offset, stop + offset), *_whole(shape[1:])),
                        ((start - first, stop - first), *_whole(shape[1:])),
                    )
                )
            row += rows
    return list(_merge_rows(pieces))


def _gated_pieces(hf_names: Sequence[str], shape: tuple[int, ...], cut: Cut) -> list[Piece]:
    rows = shape[0] // 2
    size, rank = (cut.size, cut.rank) if cut.dim is not None else (1, 0)
    return [
        Piece(
            hf_name,
            (rows * size, *shape[1:]),
            ((rank * rows, (rank + 1) * rows), *_whole(shape[1:])),
            ((half * rows, (half + 1) * rows), *_whole(shape[1:])),
        )
        for half, hf_name in enumerate(hf_names)
    ]


def _plain_piece(hf_name: str, shape: tuple[int, ...], cut: Cut, rows: int | None) -> Piece:
    hf_shape, hf_box, local_box = list(shape), list(_whole(shape)), list(_whole(shape))
    if cut.dim is not None:
        length = shape[cut.dim]
        hf_shape[cut.dim] = length * cut.size
        hf_box[cut.dim] = (cut.rank * length, (cut.rank + 1) * length)
    if rows is not None:
        start, stop = hf_box[0]
        hf_shape[0] = rows
        hf_box[0] = (min(start, rows), min(stop, rows))
        local_box[0] = (0, hf_box[0][1] - hf_box[0][0])
    return Piece(hf_name, tuple(hf_shape), tuple(hf_box), tuple(local_box))


def _whole(shape: Iterable[int]) -> Iterator[tuple[int, int]]:
    return ((0, length) for length in shape)


def _merge_rows(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Joins row pieces that are neighbours on both sides, as a model with one group has them."""
    pending: Piece | None = None
    for piece in pieces:
        if (
            pending is not None
            and piece.hf_name == pending.hf_name
            and piece.hf_box[0][0] == pending.hf_box[0][1]
            and piece.local_box[0][0] == pending.local_box[0][1]
        ):
            pending = Piece(
                piece.hf_name,
                piece.hf_shape,
                ((pending.hf_box[0][0], piece.hf_box[0][1]), *piece.hf_box[1:]),
                ((pending.local_box[0][0], piece.local_box[0][1]), *piece.local_box[1:]),
            )
            continue
        if pending is not None:
            yield pending
        pending = piece
    if pending is not None:
        yield pending


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Says how `boxes` fail to cover a tensor of `shape` exactly once; None if they do.

    Boxes come from cutting along one dimension, so it is enough that they lie end to end along one and are whole in
    the others.
    """
    total = math.prod(shape)
    volume = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    if volume < total:
        return f"{total - volume} of {total} elements are missing"
    if volume > total:
        return f"{volume - total} elements come twice"
    for dim in range(len(shape)):
        edges = sorted(box[dim] for box in boxes)
        if edges[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(edges)):
            return None
    return "its pieces overlap"


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
