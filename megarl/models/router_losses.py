"""Losses that keep a router's load even and its logits small, over the global mini-batch.

Megarl computes them itself. Megatron-Core's are means over a micro-batch: of one pack, whose sequences they take for
one, so that they would depend on how sequences happen to be packed, and on the number of packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import functional

from megarl import platform
from megarl.data.packing import PackedBatch
from megarl.models.router import tokens_of_routers
from megarl.parallel.groups import Groups

_TINY = 1e-20
"""Megatron-Core's and transformers' guard of the sum of sigmoid scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLossWeights:
    """Weights of the two losses of each router; 0: none."""

    aux_loss: float = 0.0
    z_loss: float = 0.0

    @property
    def any(self) -> bool:
        return self.aux_loss > 0 or self.z_loss > 0


class RouterLosses:
    """The losses of one mini-batch."""

    def __init__(self, weights: RouterLossWeights, batches: Sequence[PackedBatch], groups: Groups) -> None:
        """Collective over the data-parallel group, for the sizes of the mini-batch.

        Args:
            batches: the micro-batches of this rank.
        """
        self.weights = weights
        self._groups = groups
        counts = torch.tensor(
            [sum(len(batch.lengths) for batch in batches), sum(sum(batch.lengths) for batch in batches)],
            dtype=torch.float64,
            device=platform.current().device,
        )
        dist.all_reduce(counts, group=groups.dp)
        self._sequences, self._tokens = counts.clamp(min=1).float().unbind()

    def of(self, batch: PackedBatch) -> MicroBatchLosses:
        """Those of a micro-batch, whose per-token tensors are this rank's."""
        cp = self._groups.cp
        place = lambda tensor: tokens_of_routers(self._groups, tensor.to(batch.input_ids.device))
        padding_sequences = len(batch.bounds) - 1 - len(batch.lengths)
        return MicroBatchLosses(
            weights=self.weights,
            of_token=place(batch.sequence_of_token(cp.size(), cp.rank())),
            real=place(~batch.is_padding),
            lengths=torch.tensor([*batch.lengths, *[1] * padding_sequences], device=batch.input_ids.device),
            sequences=self._sequences,
            tokens=self._tokens,
            group=self._groups.megatron.tp_cp,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchLosses:
    """What the losses of a micro-batch take beside a router's logits."""

    weights: RouterLossWeights
    of_token: torch.Tensor
    """int64 [tokens]: which sequence of the pack a token of this rank's routers belongs to"""
    real: torch.Tensor
    """bool [tokens]"""
    lengths: torch.Tensor
    """int64 [sequences of the pack]: real tokens; 1 for padding, which has none"""
    sequences: torch.Tensor
    """Of the global mini-batch, 0-dim"""
    tokens: torch.Tensor
    """Real ones of the global mini-batch, 0-dim"""
    group: dist.ProcessGroup
    """Ranks that share a sequence's tokens."""

    def aux_loss(self, scores: torch.Tensor, topk: int) -> torch.Tensor:
        """This rank's share of the mean over sequences of Σ_i f_i · P_i; 1 where all experts are used alike.

        DeepSeek-V3, arXiv:2412.19437, equations 17 to 20: f_i counts how often expert i is among a token's `topk`
        highest scores, P_i is the mean of its scores, both over the tokens of one sequence. Collective over `group`.

        Args:
            scores: float32 [tokens, experts] that sum to 1.
        """
        with torch.no_grad():
            load = self._load(scores, topk)
            # The load has no gradient, so that the rest is a sum over tokens, of which each rank takes its own.
            scale = scores.shape[1] / (topk * self.lengths.float() ** 2 * self.sequences)
            of_sequence = load * scale.unsqueeze(1)
        return (scores * of_sequence[self.of_token] * self.real.unsqueeze(1)).sum()

    def z_loss(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's share of the mean over tokens of (log Σ_i exp logit_i)² (ST-MoE, arXiv:2202.08906)."""
        return (torch.logsumexp(logits, dim=1).square() * self.real).sum() / self.tokens

    def _load(self, scores: torch.Tensor, topk: int) -> torch.Tensor:
        """float32 [sequences, experts]: how many tokens of a sequence have an expert among their highest scores."""
        shape = (len(self.lengths), scores.shape[1])
        places = self.of_token.unsqueeze(1) * shape[1] + scores.topk(topk, dim=1).indices
        counted = self.real.float().unsqueeze(1).expand(places.shape)
        load = scores.new_zeros(shape).view(-1).index_add_(0, places.flatten(), counted.flatten()).view(shape)
        if self.group.size() > 1:
            dist.all_reduce(load, group=self.group)
        return load


def expert_scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """float32 [tokens, experts]: a router's distribution over all experts, before any bias or choice."""
    if score_function == "softmax":
        return functional.softmax(logits, dim=1, dtype=torch.float32)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(dim=1, keepdim=True) + _TINY)
