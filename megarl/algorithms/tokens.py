"""What formulas over tokens share: reading only what a mask keeps, log-ratios, and the sequences of packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio, in both directions, before exp is taken of it; verl's. Sums of larger powers overflow."""


_CACHE_SIZED_CHUNK = 1 << 17
"""Elements that fit a CPU's cache in float32 and float64 together: sums chunk by chunk are several times faster."""


def row_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same few rows of each of the tensors [rows, time], chunk by chunk, of a size that stays in cache."""
    rows = max(1, _CACHE_SIZED_CHUNK // max(tensors[0].shape[1], 1))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` in float32 where `mask` is true, 0 elsewhere; same shape.

    Selected, never multiplied by the mask: 0 · NaN is NaN. The gradient is 0 outside the mask as long as what follows
    has a finite derivative at 0, so select the inputs of a formula and not only its result.

    Args:
        mask: the shape of `values`; boolean or 0/1.

    Raises:
        ValueError: the shapes differ. Broadcasting would hide a mask of another batch.
    """
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {list(mask.shape)}, values {list(values.shape)}")
    return torch.where(mask.bool(), values.float(), 0.0)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log-prob − other log-prob in float32 where `mask` is true, 0 elsewhere. The other policy gets no gradient."""
    return select(logprobs, mask) - select(other_logprobs.detach(), mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss:
    """What a loss gives."""

    loss: Tensor
    """float32, the shape of the inputs: the loss of each token, 0 where the mask is 0; `aggregate` adds it up"""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Metrics as sums over these tokens, without gradient: summed over micro-batches and ranks and divided by the
    number of valid tokens, each is the mean over tokens that its name stands for"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Which responses tokens belong to, when tokens are packed, or are one context-parallel rank's part of a pack."""

    of_token: Tensor
    """int64, the shape of the tokens: the row of each, as an index into `lengths`; any row for masked tokens"""
    lengths: Tensor
    """int64 [rows], valid tokens of each whole response, on all context-parallel ranks together"""
    sum: Callable[[Tensor], Tensor] = lambda tensor: tensor
    """The elementwise sum over the context-parallel ranks that hold parts of the same responses"""

    @classmethod
    def of(cls, tokens: Tensor, mask: Tensor, given: Sequences | None) -> Sequences:
        """Those that are given; otherwise tokens are padded [rows, time], and each row is a response.

        Raises:
            ValueError: none are given and tokens are not [rows, time].
        """
        if given is not None:
            return given
        if tokens.dim() != 2:
            raise ValueError(f"tokens of shape {list(tokens.shape)} are not rows: say which sequence each belongs to")
        rows = torch.arange(len(tokens), device=tokens.device)
        return cls(of_token=rows.unsqueeze(1).expand(tokens.shape), lengths=mask.bool().sum(dim=1))

    def token_sums(self, *values: Tensor) -> list[Tensor]:
        """Sums of `values` over each whole response, at each of its tokens.

        Collective over context-parallel ranks, once for all `values`. Summed in float64, in which an order of tokens
        does not show.

        Args:
            values: the shape of the tokens, 0 on masked ones.
        """
        totals = torch.zeros(len(values), len(self.lengths), dtype=torch.float64, device=values[0].device)
        for total, value in zip(totals, values, strict=True):
            total.index_add_(0, self.of_token.flatten(), value.flatten().double())
        return [total.float()[self.of_token] for total in self.sum(totals)]

    def token_means(self, *values: Tensor) -> list[Tensor]:
        """`token_sums` over the response's valid tokens."""
        lengths = self.lengths.clamp(min=1)[self.of_token]
        return [total / lengths for total in self.token_sums(*values)]
