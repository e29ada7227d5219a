"""Where each Hugging Face tensor lies in a layout: by its name alone, without building or asking any rank.

Model folders name the module of each tensor, and the module says how Megatron-Core shares it out. That is a second
description beside the modules themselves, so it is proven against them: each rank compares what this says it holds with
what it does hold (`own_problem`) before anything is moved.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

from megarl.config.layout import Layout
from megarl.weights.boxes import Box
from megarl.weights.geometry import Cut, parameter_pieces


class Split(StrEnum):
    """Which ranks of a pipeline stage hold different parts."""

    WHOLE = "whole"
    """None: each rank has the whole tensor."""
    TENSOR = "tensor"
    """Tensor-parallel ranks."""
    EXPERT = "expert"
    """Expert- and expert-tensor-parallel ranks, of the tensors of routed experts."""


class Place(NamedTuple):
    """The ranks that hold a part of a tensor: those of one stage that have one place in a split."""

    stage: int
    split: Split
    index: int
    """0, the tensor-parallel rank, or expert-parallel rank × ETP + expert-tensor-parallel rank."""


class Part(NamedTuple):
    """A box of a tensor and who holds it."""

    place: Place
    box: Box
    numel: int


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of the checkpoint and its parts, which make it up exactly once."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    expert: int | None
    """Number of the routed expert that it belongs to."""
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Sizes of the model that its tensors' shapes do not tell."""

    layers: int
    query_heads: int
    key_value_groups: int
    experts: int
    """Routed, of each layer; 0: a dense model."""


_ROWS = ("gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj")
_COLUMNS = ("o_proj", "down_proj", "w2")
_WHOLE = ("gate", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa")
"""And all norms."""
_VOCABULARY = ("embed_tokens", "lm_head")
_FUSED = ("q_proj", "k_proj", "v_proj")
"""One parameter in Megatron-Core, but for queries that have no key projection beside them (latent attention)."""

EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def place_tensors(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, heads: Heads, dtype: torch.dtype
) -> list[PlacedTensor]:
    """The tensors of a language model with their parts, in the order of `shapes`.

    Args:
        shapes: of the whole tensors, by name (`architecture_tensors`).
        dtype: of the weights; a router's expert bias is float32 whatever it is.

    Raises:
        NotImplementedError: a module that the rules do not know.
    """
    stages = {
        layer: stage
        for stage in range(layout.pp)
        for layers in layout.chunk_layers(heads.layers, stage)
        for layer in layers
    }
    fused = _FusedBoxes(layout.tp, heads)
    experts_of_a_rank = max(heads.experts // layout.ep, 1)
    placed = []
    for name, shape in shapes.items():
        layer, expert = _LAYER.search(name), EXPERT.search(name)
        stage = stages[int(layer[1])] if layer else (0 if ".embed_tokens." in name else layout.pp - 1)
        if expert:
            size, first = layout.etp, int(expert[1]) // experts_of_a_rank * layout.etp
        else:
            size, first = layout.tp, 0
        split, boxes = _boxes(name, shape, size, shapes, fused)
        if expert:
            split = Split.EXPERT
        parts = tuple(Part(Place(stage, split, first + rank), box, _numel(box)) for rank, box in boxes if _numel(box))
        number = int(expert[1]) if expert else None
        placed.append(PlacedTensor(name, torch.float32 if _is_bias(name) else dtype, shape, number, parts))
    return placed


def _is_bias(name: str) -> bool:
    return name.endswith(".e_score_correction_bias")


def _boxes(
    name: str, shape: tuple[int, ...], size: int, shapes: Mapping[str, tuple[int, ...]], fused: _FusedBoxes
) -> tuple[Split, list[tuple[int, Box]]]:
    """How a tensor is split over `size` ranks, and the box of each by its number."""
    module = name.split(".")[-2]
    whole = tuple((0, length) for length in shape)
    if module in _FUSED and (key := _beside(name, "k_proj")) in shapes:
        return Split.TENSOR, fused.boxes(module, shapes[_beside(name, "q_proj")], shapes[key])
    if module in _VOCABULARY:
        rows = -(-shape[0] // size)
        edges = [min(rank * rows, shape[0]) for rank in range(size + 1)]
        return Split.TENSOR, _cut(whole, 0, edges)
    if module in (*_ROWS, *_FUSED):
        return Split.TENSOR, _cut(whole, 0, _equal(shape[0], size))
    if module in _COLUMNS and len(shape) > 1:
        return Split.TENSOR, _cut(whole, 1, _equal(shape[1], size))
    if module in (*_WHOLE, *_COLUMNS) or module.endswith("norm"):
        return Split.WHOLE, [(0, whole)]
    raise NotImplementedError(f"the weight map has no rule for {name}")


def _beside(name: str, module: str) -> str:
    """The tensor of another module of the same attention."""
    *before, _, kind = name.split(".")
    return ".".join((*before, module, kind))


def _equal(length: int, size: int) -> list[int]:
    return [rank * length // size for rank in range(size + 1)]


def _cut(whole: Box, dim: int, edges: list[int]) -> list[tuple[int, Box]]:
    return [(rank, (*whole[:dim], bounds, *whole[dim + 1 :])) for rank, bounds in enumerate(itertools.pairwise(edges))]


def _numel(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


class _FusedBoxes:
    """Boxes of queries, keys and values, which tensor parallelism cuts as one matrix. The same in all layers."""

    def __init__(self, tp: int, heads: Heads) -> None:
        self._tp, self._heads = tp, heads
        self._found: dict[tuple, dict[str, list[tuple[int, Box]]]] = {}

    def boxes(self, module: str, queries: tuple[int, ...], keys: tuple[int, ...]) -> list[tuple[int, Box]]:
        """Of one of the three, from the shapes of queries and keys."""
        if (queries, keys) not in self._found:
            self._found[queries, keys] = self._make(queries, keys)
        return self._found[queries, keys][module]

    def _make(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> dict[str, list[tuple[int, Box]]]:
        boxes: dict[str, list[tuple[int, Box]]] = {module: [] for module in _FUSED}
        local = ((queries[0] + 2 * keys[0]) // self._tp, *queries[1:])
        for rank in range(self._tp):
            pieces = parameter_pieces(
                "linear_qkv",
                _FUSED,
                local,
                Cut(rank=rank, size=self._tp, dim=0),
                vocab_size=0,
                query_heads=self._heads.query_heads,
                groups=self._heads.key_value_groups,
            )
            for piece in pieces:
                boxes[piece.hf_name].append((rank, piece.hf_box))
        return boxes


def rank_places(layout: Layout, rank: int) -> tuple[Place, Place, Place]:
    """The places that a rank has."""
    at = layout.coordinates(rank)
    return (
        Place(at.pp, Split.WHOLE, 0),
        Place(at.pp, Split.TENSOR, at.tp),
        Place(at.pp, Split.EXPERT, at.ep * layout.etp + at.etp),
    )


Held = Mapping[str, tuple[tuple[int, ...], torch.dtype, frozenset[Box]]]
"""Shape, dtype and boxes of the tensors of which a rank holds something."""


def own_problem(placed: Mapping[str, PlacedTensor], layout: Layout, rank: int, held: Held) -> str | None:
    """Says how what `rank` really holds differs from what the placement says it does; None if it does not."""
    places = frozenset(rank_places(layout, rank))
    expected = dict(_expected(placed, places))
    for name in sorted(expected.keys() | held.keys()):
        if expected.get(name) != held.get(name):
            return f"rank {rank} holds {held.get(name)} of {name}, where the weight plan has {expected.get(name)}"
    return None


def _expected(
    placed: Mapping[str, PlacedTensor], places: frozenset[Place]
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype, frozenset[Box]]]]:
    for name, tensor in placed.items():
        boxes = frozenset(part.box for part in tensor.parts if part.place in places)
        if boxes:
            yield name, (tensor.shape, tensor.dtype, boxes)
