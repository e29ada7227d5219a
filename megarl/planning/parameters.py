"""How many weights each rank holds. All ranks of one pipeline stage hold equally many."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megarl.config.layout import Layout
from megarl.planning.architecture import Architecture, Head, Split, Weight


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Weights on one rank, by the ranks that hold copies of them."""

    dense: int
    """Shared with the ranks of the data- and context-parallel group."""
    expert: int
    """Of routed experts, shared with those of the expert-data-parallel group."""

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: RankParameters) -> RankParameters:
        return RankParameters(self.dense + other.dense, self.expert + other.expert)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one virtual pipeline stage of one rank has."""

    layers: range
    """Numbers of its transformer layers, from 0."""
    is_first: bool
    """Whether it begins with the embedding."""
    is_last: bool
    """Whether it ends with the head."""


def stage_chunks(layout: Layout, num_layers: int, stage: int) -> list[Chunk]:
    """The chunks of pipeline stage `stage`, in the order in which tokens pass through them."""
    return [
        Chunk(
            layers=layers,
            is_first=stage == 0 and virtual == 0,
            is_last=stage == layout.pp - 1 and virtual == layout.vpp - 1,
        )
        for virtual, layers in enumerate(layout.chunk_layers(num_layers, stage))
    ]


def padded_vocab(architecture: Architecture, tp: int) -> int:
    """Rows of embedding and output layer: a multiple of the tensor-parallel size."""
    return -(-architecture.shape.vocab_size // tp) * tp


@functools.lru_cache(maxsize=65536)
def stage_parameters(
    architecture: Architecture, layout: Layout, stage: int, head: Head = Head.LOGITS
) -> RankParameters:
    """Weights on each rank of one pipeline stage."""
    total = RankParameters(0, 0)
    vocab = padded_vocab(architecture, layout.tp)
    for chunk in stage_chunks(layout, architecture.shape.num_layers, stage):
        for layer in chunk.layers:
            total += _layer_share(architecture, architecture.is_moe_layer(layer), layout.tp, layout.ep * layout.etp)
        ends = [architecture.embedding(vocab)] if chunk.is_first else []
        if chunk.is_last:
            ends += _head(architecture, head, vocab, has_embedding=chunk.is_first)
        total += _share(ends, layout.tp, layout.ep * layout.etp)
    return total


@functools.lru_cache(maxsize=64)
def engine_parameters(architecture: Architecture, tensor_parallel_size: int) -> float:
    """Weights on each rank of an engine that shares matrices, those of experts too, over its ranks."""
    size = tensor_parallel_size
    vocab = padded_vocab(architecture, size)
    weights = [
        architecture.embedding(vocab),
        *(weight for kind in architecture.layer_kinds() for weight in architecture.layer_weights(kind)),
        *_head(architecture, Head.LOGITS, vocab, has_embedding=True),
    ]
    return sum(weight.numel / (1 if weight.split is Split.WHOLE else size) for weight in weights)


def model_parameters(architecture: Architecture) -> int:
    """Weights of the whole model, without padding."""
    return stage_parameters(architecture, Layout(), 0).total


@functools.lru_cache(maxsize=16)
def layers_token_weights(architecture: Architecture) -> int:
    """Weights of all layers that one token is multiplied by: of the routed experts only those it is sent to."""
    total = 0
    for is_moe in architecture.layer_kinds():
        for weight in architecture.layer_weights(is_moe):
            if weight.split is Split.EXPERT:
                total += architecture.shape.experts_per_token * architecture.expert_numel
            elif weight.is_matrix:
                total += weight.numel
    return total


@functools.lru_cache(maxsize=1024)
def _layer_share(architecture: Architecture, is_moe: bool, tp: int, expert_shards: int) -> RankParameters:
    return _share(architecture.layer_weights(is_moe), tp, expert_shards)


def _head(architecture: Architecture, head: Head, vocab: int, *, has_embedding: bool) -> Iterator[Weight]:
    """A tied output layer is the embedding where both are on one chunk, and a copy of it elsewhere."""
    for weight in architecture.head_weights(head, vocab):
        if not (weight.name == "output layer" and architecture.shape.tied and has_embedding):
            yield weight


def _share(weights: Iterable[Weight], tp: int, expert_shards: int) -> RankParameters:
    """One rank's share of weights of which `expert_shards` ranks hold one copy of the experts."""
    dense = expert = 0
    for weight in weights:
        match weight.split:
            case Split.TENSOR:
                dense += weight.numel // tp
            case Split.WHOLE:
                dense += weight.numel
            case Split.EXPERT:
                expert += weight.numel // expert_shards
    return RankParameters(dense, expert)
