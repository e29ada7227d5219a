"""Experts that were chosen earlier, replayed: R2 (arXiv:2507.18071) and R3 (arXiv:2510.11370).

With R2 the routers' choice when old log-probs are computed is recorded and replayed in the updates; with R3 that of the
engine is replayed in both. Only the choice is fixed: the weights of the chosen experts come from the router as it is,
with their gradient.
"""

from __future__ import annotations

import dataclasses

import torch

from megarl.data.packing import PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.router import tokens_of_routers
from megarl.models.router_hook import MicroBatchRouting, router_hooks
from megarl.models.router_losses import RouterLosses
from megarl.parallel.groups import Groups


def mixtures_of_rank(model: MegatronModel) -> list[int]:
    """Which of the model's mixtures (its layers with experts, counted from 0) this rank has, in the order of chunks."""
    config = model.config
    frequency = config.moe_layer_freq
    # Megatron-Core: a list with 1 for each mixture, or every how many layers there is one.
    pattern = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(config.num_layers)]
    return [sum(map(bool, pattern[: hook.layer_number - 1])) for hook in router_hooks(model.chunks)]


def for_routers(batch: PackedBatch, groups: Groups) -> PackedBatch:
    """A context-parallel rank's micro-batch with the experts of the tokens that this rank's routers see."""
    if batch.routed_experts is None:
        return batch
    return dataclasses.replace(batch, routed_experts=tokens_of_routers(groups, batch.routed_experts))


class RouterPass:
    """What the routers of this rank do in one pass over micro-batches."""

    def __init__(
        self,
        model: MegatronModel,
        *,
        replay: bool = False,
        record: bool = False,
        losses: RouterLosses | None = None,
    ) -> None:
        """Args:
        replay: the experts that micro-batches bring along (`PackedBatch.routed_experts`) are chosen again.
        record: the choices are kept, for `recorded`.
        losses: of an update.
        """
        self._replay = replay
        self._record = record
        self._losses = losses
        self._mixtures = [len(list(router_hooks([chunk]))) for chunk in model.chunks]
        self._kept: dict[tuple[int, int], MicroBatchRouting] = {}

    def routing(self, chunk: int, index: int, batch: PackedBatch) -> MicroBatchRouting | None:
        """What the routers of a chunk are told of a micro-batch.

        Args:
            chunk: its number on this rank.
            index: of the micro-batch.
        """
        if not self._mixtures[chunk]:
            return None
        routing = MicroBatchRouting(records=self._record)
        if self._replay and batch.routed_experts is not None:
            first = sum(self._mixtures[:chunk])
            part = batch.routed_experts[:, first : first + self._mixtures[chunk]]
            routing.replayed = part.to(batch.input_ids.device, non_blocking=True)
        if self._losses is not None:
            routing.losses = self._losses.of(batch)
        if self._record:
            self._kept[chunk, index] = routing
        return routing

    def recorded(self, batches: list[PackedBatch]) -> list[PackedBatch]:
        """The micro-batches with the choices of this pass; as they were on a rank without routers."""
        if not any(self._mixtures):
            return batches
        return [
            dataclasses.replace(batch, routed_experts=self._recorded_of(index)) for index, batch in enumerate(batches)
        ]

    def _recorded_of(self, index: int) -> torch.Tensor:
        parts = [
            self._kept[chunk, index].recorded[place]
            for chunk, mixtures in enumerate(self._mixtures)
            for place in range(mixtures)
        ]
        return torch.stack(parts, dim=1).cpu()
