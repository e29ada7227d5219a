"""What pure functions need to know of the other ranks, without knowing how ranks talk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AcrossRanks:
    """Collectives over the data-parallel ranks that share a batch; the default is a single rank.

    Every rank calls them in the same order, ranks without rows included.
    """

    sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """The elementwise sum of the ranks' tensors, which have one shape; a new tensor"""
    gather: Callable[[Tensor], Tensor] = lambda rows: rows
    """The ranks' numbers of rows [rows], one after the other, as [all rows]: in one order, the same on every rank"""
    mine: Tensor | None = None
    """int64 [rows]: where this rank's rows stand in what `gather` gives; None where it gives them back as they are"""

    def take(self, gathered: Tensor) -> Tensor:
        """This rank's part of numbers of all rows: [all rows] → [rows]."""
        return gathered if self.mine is None else gathered[self.mine]


ONE_RANK = AcrossRanks()
"""All rows are here."""
