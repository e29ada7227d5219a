"""What routers did in the updates of a step: load of each expert, entropy, losses, agreement with what is replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist


class _Sum(IntEnum):
    """Places of the sums of one layer, before those of its experts' loads."""

    TOKENS = 0
    ENTROPY = 1
    AUX_LOSS = 2
    Z_LOSS = 3
    AGREEING = 4
    REPLAYED = 5


class LayerStatistics:
    """Sums over the real tokens of one router on this rank. They stay on the device until they are reduced."""

    def __init__(self, experts: int, device: str) -> None:
        self.sums = torch.zeros(len(_Sum) + experts, dtype=torch.float64, device=device)

    def add_choice(self, routing_map: torch.Tensor, scores: torch.Tensor, real: torch.Tensor) -> None:
        """Args:
        routing_map: bool [tokens, experts], where tokens go.
        scores: [tokens, experts], the router's distribution over experts.
        real: bool [tokens], false on padding.
        """
        mask = real.unsqueeze(1)
        self.sums[_Sum.TOKENS] += real.sum()
        self.sums[_Sum.ENTROPY] += (torch.special.entr(scores.float()) * mask).sum()
        self.sums[len(_Sum) :] += (routing_map & mask).sum(dim=0)

    def add_losses(self, aux_loss: torch.Tensor, z_loss: torch.Tensor) -> None:
        """This rank's shares of the mini-batch's losses, before their weights."""
        self.sums[_Sum.AUX_LOSS] += aux_loss
        self.sums[_Sum.Z_LOSS] += z_loss

    def add_replay(self, own: torch.Tensor, replayed: torch.Tensor, compared: torch.Tensor) -> None:
        """Args:
        own, replayed: [tokens, top-k] experts, in any order: what the router would have chosen, and what is replayed.
        compared: bool [tokens], which tokens count.
        """
        same = (own.sort(dim=1).values == replayed.sort(dim=1).values).all(dim=1)
        self.sums[_Sum.AGREEING] += (same & compared).sum()
        self.sums[_Sum.REPLAYED] += compared.sum()


class RouterStatistics:
    """Those of all routers of a model on this rank."""

    def __init__(self, routers: Sequence[Any], *, num_layers: int, num_experts: int, device: str) -> None:
        """Args:
        routers: Megatron-Core's, of this rank's layers; may be none.
        num_layers: of the whole model, dense ones included.
        """
        self._routers = routers
        self._shape = (num_layers, len(_Sum) + 2 * num_experts)
        self._experts = num_experts
        self._device = device
        self.layers = [LayerStatistics(num_experts, device) for _ in routers]
        self._mini_batches = 0

    def count_mini_batch(self) -> None:
        """One more optimizer step. Its losses are means over it, so over several they are added and divided."""
        self._mini_batches += 1

    def reduce(self, group: dist.ProcessGroup, *, holds_biases: bool) -> RouterReport | None:
        """Over all ranks, and starts again from nothing. Collective over `group`, the world.

        Every rank has tokens of its own (sequence parallelism shares them out in a tensor-parallel group), so that
        sums are sums; biases are the same on all ranks of a stage.

        Args:
            holds_biases: whether this rank is the one of its stage that brings them along.

        Returns:
            None where there has been no update.
        """
        table = torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        known = len(_Sum) + self._experts
        for router, layer in zip(self._routers, self.layers, strict=True):
            row = table[router.layer_number - 1]
            row[:known] = layer.sums
            if holds_biases and router.expert_bias is not None:
                row[known:] = router.expert_bias
            layer.sums.zero_()
        mini_batches, self._mini_batches = self._mini_batches, 0
        dist.all_reduce(table, group=group)
        if not mini_batches or not table[:, _Sum.TOKENS].any():
            return None
        return RouterReport(table.cpu(), self._experts, mini_batches)


class RouterReport:
    """The statistics of a step over all ranks and layers."""

    def __init__(self, table: torch.Tensor, experts: int, mini_batches: int) -> None:
        mixtures = table[:, _Sum.TOKENS] > 0
        rows = table[mixtures]
        # [mixtures, experts]: tokens that each expert had, over all updates of the step.
        self._load = rows[:, len(_Sum) : len(_Sum) + experts]
        self._biases = rows[:, len(_Sum) + experts :]
        self._sums = rows[:, : len(_Sum)]
        self._mini_batches = mini_batches

    def metrics(self, *, aux_loss: bool, z_loss: bool) -> dict[str, float]:
        """docs/metrics.md has what they mean.

        Args:
            aux_loss, z_loss: whether the model has these losses.
        """
        total = self._sums.sum(dim=0)
        tokens = float(total[_Sum.TOKENS])
        over_mean = self._load.max(dim=1).values / self._load.mean(dim=1)
        found = {
            "router/load_max_over_mean/mean": float(over_mean.mean()),
            "router/load_max_over_mean/max": float(over_mean.max()),
            "router/idle_experts": float((self._load == 0).double().mean()),
            "router/entropy": float(total[_Sum.ENTROPY]) / tokens,
        }
        mean_over_layers = lambda place: float(total[place]) / (self._mini_batches * len(self._load))
        if aux_loss:
            found["router/aux_loss"] = mean_over_layers(_Sum.AUX_LOSS)
        if z_loss:
            found["router/z_loss"] = mean_over_layers(_Sum.Z_LOSS)
        if total[_Sum.REPLAYED] > 0:
            found["router/agreement"] = float(total[_Sum.AGREEING] / total[_Sum.REPLAYED])
        if self._biases.any():
            found["router/expert_bias/max"] = float(self._biases.abs().max())
            found["router/expert_bias/rms"] = float(self._biases.norm()) / math.sqrt(self._biases.numel())
        return found
