"""Tensors whose parts lie anywhere: boxes in torch's distributed checkpoint format, written and read in any division.

The distributed optimizer gives each data-parallel rank a range of a parameter's elements in row-major order, wherever
that begins and ends. A range is a few boxes, and boxes are what the format stores; so each rank writes what it holds
and reads what it needs, and nothing is gathered. (Megatron-Core's formats of that optimizer that every layout can read
gather all of it to one rank of the data-parallel group.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megarl.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxTensor:
    """A part of a tensor that a rank holds."""

    name: str
    """Of the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the part begins in it."""
    data: torch.Tensor
    """With as many dimensions as the whole."""
    may_lack_rows: bool = False
    """The whole may have another number of rows where it was stored, for padding: rows that it lacks are set to 0."""


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements `start` … `stop` of a tensor in row-major order, as boxes (offsets, sizes) in this order.

    At most 2·dimensions − 1 of them: a part of the first row, whole rows, a part of the last.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start < stop:
        for offsets, sizes in boxes_of_range(shape[1:], start, stop):
            yield (index, *offsets), (1, *sizes)


class BoxSavePlanner(DefaultSavePlanner):
    """Writes boxes, of which no two ranks have the same."""

    def __init__(self, boxes: Sequence[BoxTensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = {_index(box): box for box in boxes}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            items=[
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=_chunk(box),
                        properties=TensorProperties.create_from_tensor(box.data),
                        size=torch.Size(box.shape),
                    ),
                )
                for index, box in self._boxes.items()
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._boxes[write_item.index].data


def read_boxes(boxes: Sequence[BoxTensor], folder: Path) -> None:
    """Fills boxes with what `folder` stores of them. Collective over the world.

    Raises:
        ConfigError: the folder lacks some of it, or is of another model.
        torch.distributed.checkpoint.CheckpointException: a file cannot be read; or one of the above, on another rank.
    """
    torch_checkpoint.load({}, storage_reader=torch_checkpoint.FileSystemReader(folder), planner=_LoadPlanner(boxes))


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, boxes: Sequence[BoxTensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = {_index(box): box for box in boxes}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for box in self._boxes.values():
            stored = self.metadata.state_dict_metadata.get(box.name)
            if not isinstance(stored, TensorStorageMetadata):
                raise ConfigError(f"there is no {box.name} in it; it is of another model")
            items += _reads(box, stored)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._boxes[read_item.dest_index].data
        for dimension, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, offset, length)
        return target


def _reads(box: BoxTensor, stored: TensorStorageMetadata) -> list[ReadItem]:
    first = 1 if box.may_lack_rows else 0
    if len(stored.size) != len(box.shape) or tuple(stored.size[first:]) != box.shape[first:]:
        raise ConfigError(
            f"its {box.name} has shape {list(stored.size)}, here it is {list(box.shape)}; it is of another model"
        )
    items = create_read_items_for_chunk_list(box.name, stored, [_chunk(box)])
    found = sum(math.prod(item.lengths) for item in items)
    if found < box.data.numel():
        if not box.may_lack_rows:
            raise ConfigError(f"its {box.name} is not complete")
        box.data.detach().zero_()
    return items


def _index(box: BoxTensor) -> MetadataIndex:
    return MetadataIndex(box.name, torch.Size(box.offsets))


def _chunk(box: BoxTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=box.data.shape)


def box_tensors(
    name: str,
    data: torch.Tensor,
    *,
    start: int,
    local_shape: Sequence[int],
    shape: Sequence[int],
    offsets: Sequence[int],
    may_lack_rows: bool,
) -> Iterator[BoxTensor]:
    """A range of the elements of a rank's part of a tensor, as boxes of the whole.

    Args:
        data: [elements] of the range.
        start: the element of the part that the range begins at.
        local_shape: of the part.
        shape: of the whole, which may have further dimensions before those of the part.
        offsets: where the part begins in the whole.
    """
    before = len(shape) - len(local_shape)
    for place, sizes in boxes_of_range(local_shape, start, start + data.numel()):
        elements = math.prod(sizes)
        part, data = data[:elements], data[elements:]
        yield BoxTensor(
            name=name,
            shape=tuple(shape),
            offsets=(*offsets[:before], *(a + b for a, b in zip(offsets[before:], place, strict=True))),
            data=part.view(*[1] * before, *sizes),
            may_lack_rows=may_lack_rows,
        )
