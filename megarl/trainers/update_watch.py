"""Guards that leave an update out, asked before it takes effect (`skip_step`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from megarl import platform
from megarl.models.train import Veto
from megarl.observe.guards import Broken, Guards
from megarl.observe.reduce import MetricSums
from megarl.parallel.groups import Groups

Add = Callable[[str, torch.Tensor | float, torch.Tensor | float], None]
"""Takes the name of a metric, a sum, and what it is over; names that nobody asks for are left alone."""

Record = Callable[[Add, list[dict[str, Any]]], None]
"""Adds what this rank knows about the micro-batches of an update, from their outputs."""


class UpdateWatch:
    """Asks the guards before each optimizer step of a rank's loop.

    They are asked about the numbers of the mini-batch itself, as far as its passes give them, and of whole steps about
    what is known before any update. About metrics that are known only later, they are asked after the step, and what
    they then leave out are the updates of the next.
    """

    def __init__(self, guards: Guards, groups: Groups) -> None:
        self._guards = guards
        self._group = groups.world
        self._wanted = {rule.metric for rule in guards.rules if rule.action == "skip_step"}
        self._sums = MetricSums(dict.fromkeys(self._wanted, "mean"), platform.current().device)
        self._skips_all = False
        self.updates = 0
        """Of this step, without those whose gradient was not finite."""
        self.skipped = 0
        """Updates of this step that were left out."""
        self.broken: list[Broken] = []
        """Why, one for each rule and update."""
        self.asked: set[str] = set()
        """Metrics that the guards were asked about."""

    def begin_step(self, known: Mapping[str, float] | None = None) -> None:
        """To be called before the updates of a step.

        Args:
            known: metrics of the step that are known before them, the same on every rank.
        """
        self.updates = self.skipped = 0
        self.asked = set(known or {})
        self.broken = self._guards.broken(known or {})
        self._skips_all = self._guards.skips_step or bool(self.broken)
        self._guards.skips_step = False

    def veto(self, grad_norm: str, record: Record) -> Veto | None:
        """For `TrainableModel.step`; None where no guard leaves updates out, so that nothing is asked.

        Args:
            grad_norm: the metric that the norm of the gradient is.
        """
        if not self._wanted:
            return None

        def decide(outputs: list[dict[str, Any]], norm: Callable[[], float]) -> bool:
            self.updates += 1
            if not self._skips_all:
                values = self._values(outputs, record) | ({grad_norm: norm()} if grad_norm in self._wanted else {})
                found = self._guards.broken(values)
                self.asked |= set(values)
                self.broken += found
                if not found:
                    return False
            self.skipped += 1
            return True

        return decide

    def _values(self, outputs: Collection[dict[str, Any]], record: Record) -> dict[str, float]:
        """The wanted metrics of a mini-batch, the same on every rank. Collective over the world."""

        def add(name: str, value: torch.Tensor | float, count: torch.Tensor | float) -> None:
            if name in self._wanted:
                self._sums.add(name, value, count=count)

        record(add, list(outputs))
        return self._sums.reduce(self._group)
