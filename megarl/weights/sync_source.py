"""A model's parameters as the source of syncs: its plan, proven against what this rank holds, and its stream."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megarl.config.layout import Layout
from megarl.models.build import MegatronModel
from megarl.weights.architecture_tensors import architecture_tensors
from megarl.weights.boxes import box_index
from megarl.weights.bucket_stream import BucketStream
from megarl.weights.geometry import Piece
from megarl.weights.pieces import Shard, model_shards, pieces_by_tensor
from megarl.weights.placement import Heads, PlacedTensor, own_problem, place_tensors
from megarl.weights.plan import EngineLayout, WeightPlan
from megarl.weights.together import raise_together


def make_bucket_stream(model: MegatronModel, engine: EngineLayout, *, bucket_bytes: int, mapped: bool) -> BucketStream:
    """The stream of this rank. Collective over the world: makes the groups of the replica domains.

    The plan needs no exchange, but a rank that derived another one would leave the others waiting in a sync. So all
    ranks compare a digest of theirs once, and each compares its own parameters with its part of the plan.

    Args:
        engine: how engines stand on the ranks; `engine.tp` divides the world.
        mapped: whether processes of the engine map the buckets (`BucketMemory`).

    Raises:
        RuntimeError: on every rank; the plan is not what a rank holds, or not the same everywhere.
    """
    layout, rank = model.groups.layout, model.groups.rank
    tensors = placed_tensors(model)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
    held = pieces_by_tensor(model_shards(model))
    problem = own_problem({tensor.name: tensor for tensor in tensors}, layout, rank, _held_boxes(held))
    raise_together(problem, RuntimeError)
    plan = WeightPlan(
        tensors,
        layout,
        engine,
        num_experts=_heads(model).experts,
        bucket_bytes=bucket_bytes,
        ranks_per_node=ranks_per_node,
    )
    _check_same(plan, ranks_per_node)
    views = {
        (name, piece.hf_box): shard.tensor[box_index(piece.local_box)]
        for name, pieces in held.items()
        for shard, piece in pieces
    }
    group = _domain_group(plan, layout, rank)
    if group is not None:
        # NCCL connects a group's ranks in its first collective, in which all have to take part; the first messages are
        # between some of them.
        dist.barrier(group)
    return BucketStream(plan, rank, views, group, mapped=mapped)


def placed_tensors(model: MegatronModel) -> list[PlacedTensor]:
    """Every tensor of the model and where its parts are, on whatever rank."""
    shapes = architecture_tensors(model.hf_config, model.role)
    return place_tensors(shapes, model.groups.layout, _heads(model), model.dtype)


def _heads(model: MegatronModel) -> Heads:
    config = model.config
    return Heads(
        layers=config.num_layers,
        query_heads=config.num_attention_heads,
        key_value_groups=config.num_query_groups,
        experts=config.num_moe_experts or 0,
    )


def _held_boxes(held: Mapping[str, Sequence[tuple[Shard, Piece]]]) -> dict[str, tuple]:
    return {
        name: (pieces[0][1].hf_shape, pieces[0][0].tensor.dtype, frozenset(piece.hf_box for _, piece in pieces))
        for name, pieces in held.items()
    }


def _check_same(plan: WeightPlan, ranks_per_node: int) -> None:
    """Raises RuntimeError on every rank if one has another plan. Collective over the world."""
    buckets = [[tensor.name for tensor in bucket] for bucket in plan.buckets]
    digest = hashlib.sha256(repr((buckets, plan.engine, ranks_per_node)).encode()).hexdigest()
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RuntimeError(
            f"rank {different[0]} and rank 0 have different weight plans, so a sync would hang: start the same number "
            "of ranks on each node, with the same config and versions"
        )


def _domain_group(plan: WeightPlan, layout: Layout, rank: int) -> dist.ProcessGroup | None:
    """The group of this rank's domain. Collective over the world: every rank makes all groups, in the same order."""
    if len(plan.domains) == 1:
        return dist.group.WORLD if layout.world_size > 1 else None
    if len(plan.domains[0].ranks) == 1:
        return None
    groups = [dist.new_group(list(domain.ranks)) for domain in plan.domains]
    return groups[layout.replica(rank)]
