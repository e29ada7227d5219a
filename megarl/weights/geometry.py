"""Which boxes of Hugging Face tensors make up a Megatron parameter shard. Pure arithmetic: no tensors, no processes.

The geometry is Megatron-Core's:

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
class Cut:
    """How one parameter is shared out."""

    rank: int
    size: int
    dim: int | None
    """The dimension that is cut; None: every rank has it whole."""


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
