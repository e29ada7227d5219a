"""Boxes: the parts of tensors that are read, sent and written."""

from __future__ import annotations

Box = tuple[tuple[int, int], ...]
"""A start and a stop for each dimension."""


def box_index(box: Box) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(start, stop) for start, stop in box)
