"""Metrics of many ranks and micro-batches made into one number each, exactly and with two collectives a step.

A mean of per-micro-batch means is wrong where they hold different counts, so sums and counts travel instead, in
float64. The names are fixed beforehand: ranks without anything to say (pipeline stages before the last) have the same
vector to reduce as the others, and none can be left waiting in a collective that another rank skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.reductions import global_sum

Kind = Literal["mean", "sum", "max", "min"]


class MetricSums:
    """What one rank has seen of each metric since the last `reduce`.

    Ranks that hold the same tokens (tensor-parallel ranks) may all record a mean, a max or a min; only one of them may
    record a sum, unless the group that reduces has only one of them.
    """

    def __init__(self, kinds: Mapping[str, Kind], device: str) -> None:
        """Declares the metrics.

        Args:
            kinds: how each metric is made into one number. Every rank declares the same ones, in any order.
            device: torch device of the accumulators, one that the group's backend reduces on. Recording what
                lies on this device, or plain numbers, does not wait for a GPU.

        Raises:
            ValueError: a kind that does not exist.
        """
        for name, kind in kinds.items():
            if kind not in get_args(Kind):
                raise ValueError(f"metric {name!r} has kind {kind!r}; kinds are {', '.join(get_args(Kind))}")
        self._kinds = dict(sorted(kinds.items()))
        # Places in the two vectors that travel: [totals | counts of them], and [maxima, minima turned round].
        self._totals = _places(self._kinds, ("mean", "sum"))
        self._extremes = _places(self._kinds, ("max", "min"))
        self._sums = torch.zeros(2, len(self._totals), dtype=torch.float64, device=device)
        self._bounds = torch.zeros(len(self._extremes), dtype=torch.float64, device=device)
        self._clear()

    def add(self, name: str, value: Tensor | float, count: Tensor | float = 1) -> None:
        """Records one number: a total, or a candidate for the largest or smallest.

        Args:
            value: one element. For a mean, the sum of `count` values.
            count: how many values a mean is over; may be a fraction, or 0. The other kinds do not read it.

        Raises:
            ValueError: the metric was not declared.
        """
        kind = self._kind(name)
        if kind in ("mean", "sum"):
            place = self._totals[name]
            self._sums[0, place] += self._number(value)
            self._sums[1, place] += self._number(count)
        else:
            self._bound(self._extremes[name], self._number(value) if kind == "max" else -self._number(value))

    def add_values(self, name: str, values: Tensor) -> None:
        """Records every element of `values`, of any shape and possibly none.

        Raises:
            ValueError: the metric was not declared.
        """
        kind = self._kind(name)
        numbers = values.detach().double()
        if kind in ("mean", "sum"):
            self.add(name, numbers.sum(), numbers.numel())
        elif numbers.numel():
            self.add(name, numbers.max() if kind == "max" else numbers.min())

    def reduce(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """The metrics over all ranks of `group`, the same on each of them, and starts again from nothing.

        Collective, whether or not a rank has recorded anything; without a group, one process is the world.

        Returns:
            A number for each metric. A mean, max or min of which no rank had a value is left out, rather than called
            0; a sum is 0 then. NaN anywhere makes the metric NaN.
        """
        # Backends disagree about NaN in a MAX, so it travels as a count in the SUM.
        poisoned = self._bounds.isnan()
        sums = global_sum(torch.cat([self._sums.flatten(), poisoned.double()]), group)
        bounds = self._bounds.masked_fill(poisoned, -math.inf)
        if group is not None and len(bounds):
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        self._clear()
        numbers = len(self._totals)
        totals, counts, poison = torch.split(sums.cpu(), [numbers, numbers, len(self._extremes)])
        bounds = bounds.cpu().masked_fill(poison > 0, math.nan)
        return self._read(totals.tolist(), counts.tolist(), bounds.tolist())

    def _read(self, totals: list[float], counts: list[float], bounds: list[float]) -> dict[str, float]:
        result = {}
        for name, kind in self._kinds.items():
            if kind == "sum":
                result[name] = totals[self._totals[name]]
            elif kind == "mean":
                place = self._totals[name]
                if counts[place] != 0:
                    result[name] = totals[place] / counts[place]
            else:
                bound = bounds[self._extremes[name]]
                if bound != -math.inf:
                    result[name] = bound if kind == "max" else -bound
        return result

    def _kind(self, name: str) -> Kind:
        if name not in self._kinds:
            raise ValueError(f"metric {name!r} was not declared; declared are {', '.join(self._kinds) or 'none'}")
        return self._kinds[name]

    def _number(self, value: Tensor | float) -> Tensor:
        device = self._sums.device
        if isinstance(value, Tensor):
            return value.detach().to(device, torch.float64).reshape(())
        # Filled on the device: `torch.tensor(value, device=…)` copies from the host, and waits for the GPU to do so.
        return torch.full((), value, dtype=torch.float64, device=device)

    def _bound(self, place: int, candidate: Tensor) -> None:
        self._bounds[place] = torch.maximum(self._bounds[place], candidate)

    def _clear(self) -> None:
        self._sums.zero_()
        self._bounds.fill_(-math.inf)


def _places(kinds: Mapping[str, Kind], wanted: tuple[Kind, ...]) -> dict[str, int]:
    """The place of each metric of these kinds in a vector of its own."""
    names = [name for name, kind in kinds.items() if kind in wanted]
    return {name: place for place, name in enumerate(names)}
