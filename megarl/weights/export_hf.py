"""Streams a model's weights as whole Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl import platform
from megarl.models.build import MegatronModel
from megarl.weights.boxes import Box, box_index
from megarl.weights.geometry import Piece, uncovered
from megarl.weights.pieces import Shard, model_shards, pieces_by_tensor
from megarl.weights.safetensors_io import TensorInfo


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
