"""What a sync of the actor's weights to the engines moves, on which links, and how long that takes.

Two ways are counted. *Whole*, as `weights.plan` does it: each engine rank gets whole tensors, in buckets, from the
nearest ranks of its replica domain that hold their parts; of the experts, those of its share where the engine has
expert parallelism. *Shares*, the floor for any other way: each engine rank gets its part of each tensor and nothing
else. Engines are `rollout.tensor_model_parallel_size` consecutive ranks of the trainer, and cut matrices, those of
experts too, into equal parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.config.layout import Coordinates, Layout
from megarl.config.model_shape import EXPERT_BIAS_MODEL_TYPES
from megarl.config.schema import RolloutConfig
from megarl.planning.architecture import Architecture, Head, Split, Weight
from megarl.planning.hardware import COLLECTIVE_EFFICIENCY, GPU, GPUS_A_NODE
from megarl.planning.parameters import stage_chunks

BUCKET_BYTES = 512 * 2**20
"""Default size of a bucket: what verl (`update_weights_bucket_megabytes`) and slime (`update_weight_buffer_size`) take.
Two of them are a small part of a GPU, and sending one takes far longer than starting to."""

UNCERTAINTY = 2.0
"""Factor within which the bytes are expected to arrive. What each tensor costs besides its bytes is not counted, and is
most of it where thousands of small ones are sent one by one: see verl's figures in `published`."""

_EXPERT_BIAS_BYTES = 4


@dataclass(frozen=True, slots=True)
class Tensors:
    """Alike tensors of the stream, as Hugging Face names them."""

    count: int
    num_bytes: int
    """Of each."""
    split: Split

    @property
    def total(self) -> int:
        return self.count * self.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One way of syncing, on the rank that waits longest."""

    rank: int
    own: float
    """Bytes that the rank has itself."""
    within_node: float
    """Bytes that it receives over the links of its node."""
    across_nodes: float
    """Bytes that it receives from other nodes."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPlan:
    """A sync of all weights."""

    engines: int
    engine_size: int
    """Ranks of one engine."""
    num_bytes: int
    tensors: int
    bucket_bytes: int
    buckets: int
    whole: Route
    shares: Route


def bucket_bytes(rollout: RolloutConfig) -> int:
    """Of a bucket on a GPU."""
    megabytes = rollout.update_weights_bucket_megabytes
    return BUCKET_BYTES if megabytes is None else megabytes * 2**20


def plan_sync(
    architecture: Architecture,
    layout: Layout,
    gpu: GPU,
    *,
    element_bytes: int,
    engine_size: int,
    engine_shares: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
) -> SyncPlan:
    """The plan.

    Args:
        gpu: its `link` and `network` are the interconnect.
        element_bytes: of a weight.
        engine_size: `rollout.tensor_model_parallel_size`; it divides the world.
        engine_shares: as in `whole_route`.
    """
    stream = [
        tensors for stage in range(layout.pp) for tensors in stage_tensors(architecture, layout, stage, element_bytes)
    ]
    return SyncPlan(
        engines=layout.world_size // engine_size,
        engine_size=engine_size,
        num_bytes=sum(tensors.total for tensors in stream),
        tensors=sum(tensors.count for tensors in stream),
        bucket_bytes=bucket_bytes,
        buckets=bucket_count((t.num_bytes for t in stream for _ in range(t.count)), bucket_bytes),
        whole=whole_route(architecture, layout, gpu, element_bytes, engine_size, engine_shares),
        shares=shares_route(architecture, layout, gpu, element_bytes, engine_size),
    )


def stage_tensors(architecture: Architecture, layout: Layout, stage: int, element_bytes: int) -> Iterator[Tensors]:
    """What one pipeline stage exports; padding of the vocabulary and a tied output layer are not sent."""
    vocab = architecture.shape.vocab_size
    for chunk in stage_chunks(layout, architecture.shape.num_layers, stage):
        if chunk.is_first:
            yield from _as_named(architecture, architecture.embedding(vocab), element_bytes)
        for layer in chunk.layers:
            is_moe = architecture.is_moe_layer(layer)
            for weight in architecture.layer_weights(is_moe):
                yield from _as_named(architecture, weight, element_bytes)
            if is_moe and architecture.shape.model_type in EXPERT_BIAS_MODEL_TYPES:
                yield Tensors(1, architecture.shape.num_experts * _EXPERT_BIAS_BYTES, Split.WHOLE)
        if chunk.is_last:
            for weight in architecture.head_weights(Head.LOGITS, vocab):
                if not (weight.name == "output layer" and architecture.shape.tied):
                    yield from _as_named(architecture, weight, element_bytes)


def _as_named(architecture: Architecture, weight: Weight, element_bytes: int) -> Iterator[Tensors]:
    """The tensors that Megatron-Core keeps as one weight, or that the architecture lists as one."""
    if weight.name.startswith("query-key-value"):
        query, key = architecture.shape.query_width, architecture.shape.key_value_width
        rows = weight.numel // (query + 2 * key) * element_bytes
        yield Tensors(1, query * rows, weight.split)
        yield Tensors(2, key * rows, weight.split)
        return
    counts = {
        "query and key norms": 2,
        "feed-forward": 3,
        "shared experts": 3,
        "experts": 3 * architecture.shape.num_experts,
    }
    count = counts.get(weight.name, 1)
    yield Tensors(count, weight.numel // count * element_bytes, weight.split)


def bucket_count(sizes: Iterable[int], bucket_bytes: int) -> int:
    """Buckets that tensors of `sizes` bytes fill one after the other; a larger one has a bucket of its own."""
    buckets = filled = 0
    for size in sizes:
        if not buckets or filled + size > bucket_bytes:
            buckets, filled = buckets + 1, 0
        filled += size
    return buckets


@functools.lru_cache(maxsize=256)
def whole_route(
    architecture: Architecture,
    layout: Layout,
    gpu: GPU,
    element_bytes: int,
    engine_size: int = 1,
    engine_shares: int = 1,
) -> Route:
    """What the weight plan moves. Domains are alike, and so are the nodes of a stage: the first of each is looked at.

    Args:
        engine_shares: in how many parts an engine shares its experts out (`config.engines`).
    """
    sizes = [_by_split(stage_tensors(architecture, layout, stage, element_bytes)) for stage in range(layout.pp)]
    stage_ranks = layout.world_size // layout.pp
    block = min(layout.replica_block, GPUS_A_NODE)
    received = {
        rank: received_whole(layout, sizes, rank, rank % engine_size * engine_shares // engine_size, engine_shares)
        for first in range(0, layout.world_size, stage_ranks)
        for rank in range(first, first + block)
    }
    seconds = {
        rank: max(within / gpu.link, across / gpu.network) / COLLECTIVE_EFFICIENCY
        for rank, (_, within, across) in received.items()
    }
    rank = max(seconds, key=seconds.__getitem__)
    own, within, across = received[rank]
    return Route(rank=rank, own=own, within_node=within, across_nodes=across, seconds=seconds[rank])


def received_whole(
    layout: Layout, sizes: Sequence[Mapping[Split, int]], rank: int, engine_share: int = 0, engine_shares: int = 1
) -> tuple[float, float, float]:
    """Bytes of the tensors a rank's engine needs that the rank has itself, gets within its node, and from other nodes.

    Args:
        sizes: bytes of all tensors of each stage, by split.
        engine_share: which of `engine_shares` equal runs of experts the engine's part on the rank has.
    """
    near = [other for other in _node_of(layout, rank) if layout.replica(other) == layout.replica(rank)]
    experts = (engine_share / engine_shares, (engine_share + 1) / engine_shares)
    own = within = across = 0.0
    for stage, by_split in enumerate(sizes):
        here = [at for at in [layout.coordinates(rank)] if at.pp == stage]
        around = [at for at in map(layout.coordinates, near) if at.pp == stage]
        for split, num_bytes in by_split.items():
            needs = experts[1] - experts[0] if split is Split.EXPERT else 1.0
            has, node_has = (_held_whole(layout, split, holders, experts) for holders in (here, around))
            own += num_bytes * has
            within += num_bytes * (node_has - has)
            across += num_bytes * (needs - node_has)
    return own, within, across


def _held_whole(layout: Layout, split: Split, holders: Sequence[Coordinates], experts: tuple[float, float]) -> float:
    """The part of a stage's tensors of one split that ranks of the stage hold between them; of experts, of a range."""
    if not holders:
        return 0.0
    match split:
        case Split.WHOLE:
            return 1.0
        case Split.TENSOR:
            return len({at.tp for at in holders}) / layout.tp
        case Split.EXPERT:
            parts = {(at.ep, at.etp) for at in holders}
            return sum(_overlap(experts, ep, layout.ep) for ep, _ in parts) / layout.etp


@functools.lru_cache(maxsize=64)
def shares_route(architecture: Architecture, layout: Layout, gpu: GPU, element_bytes: int, engine_size: int) -> Route:
    """Each engine rank receives what it needs and does not have; holders of the same send equally much."""
    sizes = [_by_split(stage_tensors(architecture, layout, stage, element_bytes)) for stage in range(layout.pp)]
    asked = [0.0] * layout.pp  # of each stage's ranks, by ranks of other nodes
    received = []
    for rank in range(layout.world_size):
        own = within = across = 0.0
        for stage, by_split in enumerate(sizes):
            for split, num_bytes in by_split.items():
                needs = 1.0 if split is Split.WHOLE else 1 / engine_size
                here = _held_share(layout, stage, split, range(rank, rank + 1), rank % engine_size, engine_size)
                near = _held_share(layout, stage, split, _node_of(layout, rank), rank % engine_size, engine_size)
                own += num_bytes * here
                within += num_bytes * (near - here)
                across += num_bytes * (needs - near)
                asked[stage] += num_bytes * (needs - near)
        received.append((own, within, across))
    stage_ranks = layout.world_size // layout.pp
    seconds = [
        max(within / gpu.link, across / gpu.network, asked[rank // stage_ranks] / stage_ranks / gpu.network)
        / COLLECTIVE_EFFICIENCY
        for rank, (_, within, across) in enumerate(received)
    ]
    rank = max(range(layout.world_size), key=seconds.__getitem__)
    own, within, across = received[rank]
    return Route(rank=rank, own=own, within_node=within, across_nodes=across, seconds=seconds[rank])


def _by_split(stream: Iterable[Tensors]) -> dict[Split, int]:
    totals = dict.fromkeys(Split, 0)
    for tensors in stream:
        totals[tensors.split] += tensors.total
    return totals


def _node_of(layout: Layout, rank: int) -> range:
    first = rank - rank % GPUS_A_NODE
    return range(first, min(first + GPUS_A_NODE, layout.world_size))


@functools.lru_cache(maxsize=2**17)
def _held_share(layout: Layout, stage: int, split: Split, ranks: range, engine_rank: int, engine_size: int) -> float:
    """The share of a stage's tensors of one split that an engine rank needs and that `ranks` hold between them."""
    holders = [at for at in map(layout.coordinates, ranks) if at.pp == stage]
    if not holders:
        return 0.0
    needed = (engine_rank / engine_size, (engine_rank + 1) / engine_size)
    match split:
        case Split.WHOLE:
            return 1.0
        case Split.TENSOR:
            return sum(_overlap(needed, tp, layout.tp) for tp in {at.tp for at in holders})
        case Split.EXPERT:
            parts = {(at.ep, at.etp) for at in holders}
            return sum(_overlap(needed, etp, layout.etp) for _, etp in parts) / layout.ep


def _overlap(needed: tuple[float, float], part: int, parts: int) -> float:
    """Of the interval `needed` and the `part`-th of equal parts of 0 to 1."""
    return max(0.0, min(needed[1], (part + 1) / parts) - max(needed[0], part / parts))
