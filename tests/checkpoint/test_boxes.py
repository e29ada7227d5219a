"""A range of a tensor's elements is cut into boxes that hold exactly these, in their order."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megarl.checkpoint.boxes import box_tensors, boxes_of_range

SHAPES = [(), (1,), (7,), (3, 4), (4, 1), (1, 5), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_hold_the_elements_of_the_range_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(numbers.numel() + 1), 2):
        boxes = list(boxes_of_range(shape, start, stop))
        parts = [
            numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
            for offsets, sizes in boxes
        ]
        assert torch.cat([*parts, numbers.new_empty(0)]).tolist() == list(range(start, stop)), (start, stop)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        assert all(min(sizes, default=1) > 0 for _, sizes in boxes)


def test_boxes_of_a_part_lie_where_the_part_does_in_the_whole() -> None:
    whole = torch.arange(3 * 4 * 6).view(3, 4, 6)
    part = whole[1, 2:4, :].contiguous()
    filled = torch.full_like(whole, -1)
    for start, stop in ((0, 5), (5, 8), (8, 12)):
        for box in box_tensors(
            "x",
            part.view(-1)[start:stop],
            start=start,
            local_shape=part.shape,
            shape=whole.shape,
            offsets=(1, 2, 0),
            may_lack_rows=False,
        ):
            filled[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.data.shape, strict=True))] = box.data
    assert torch.equal(filled[1, 2:4], part)
    assert (filled != -1).sum() == part.numel()
