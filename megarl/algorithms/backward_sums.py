"""Sums that run backwards along a response, over its valid tokens."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 32
"""Columns that one matrix product sums. More would multiply by more zeros, fewer would be more products."""

_BLOCK_ELEMENTS = 1 << 18
"""Elements of the float64 block that is made ready for several products: 2 MiB, which stays in cache."""


def discounted_sums(
    rewards: Tensor, mask: Tensor, factor: float, values: Tensor | None = None, gamma: float = 1.0
) -> Tensor:
    """y_t = x_t + factor · y_{t+1} over a row's valid tokens, from the last one back, with 0 after it.

    x is the reward, or with `values` the temporal difference reward_t + γ·value_{t+1} − value_t. t + 1 is the next
    valid token: a span of masked tokens (a tool's answer) is as if it were not there.

    Args:
        rewards: [rows, time]; what stands under 0 is not read.
        mask: [rows, time], 1 on valid tokens.
        values: [rows, time]; what stands under 0 is not read.

    Returns:
        float32 [rows, time], 0 where the mask is 0. Computed in float64 and rounded once.

    Raises:
        ValueError: the shapes differ.
    """
    for given in (rewards, *(() if values is None else (values,))):
        if given.shape != mask.shape:
            raise ValueError(f"mask has shape {list(mask.shape)}, values {list(given.shape)}")
    valid = mask.bool()
    lengths = valid.sum(dim=1, dtype=torch.int32)  # int64 takes fifteen times as long
    longest = int(lengths.max()) if lengths.numel() else 0
    is_token = torch.arange(longest, device=mask.device) < lengths.unsqueeze(1)
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if torch.equal(is_token, valid[:, :longest]):
        _scan(out[:, :longest], rewards, is_token, factor, values, gamma)
        return out
    places, places_left = (tensor.reshape(-1).nonzero().squeeze(1) for tensor in (valid, is_token))
    # Indexing with the masks themselves would search for these places anew each time.
    left = lambda given: out.new_zeros(is_token.shape).masked_scatter_(is_token, _at(given, places))
    sums = out.new_empty(is_token.shape)
    _scan(sums, left(rewards), is_token, factor, None if values is None else left(values), gamma)
    return out.masked_scatter_(valid, _at(sums, places_left))


def _at(given: Tensor, places: Tensor) -> Tensor:
    """float32 [places], the values at these places of the flattened tensor."""
    return given.reshape(-1).index_select(0, places).float()


def _scan(out: Tensor, rewards: Tensor, is_token: Tensor, factor: float, values: Tensor | None, gamma: float) -> None:
    """Writes the sums of rows whose valid tokens are the first ones; 0 after them.

    Step by step over time, each step would touch one number of every cache line, or be a launch on a GPU. So a few
    columns are summed at once, by a product with the matrix of powers of `factor`, after what follows them has been
    added to the last one.

    Args:
        out: [rows, longest]; so is `is_token`
        rewards: [rows, at least longest]; so are `values`
    """
    rows, longest = is_token.shape
    powers = _powers(factor, out.device)
    empty = lambda columns: torch.empty(rows, columns, dtype=torch.float64, device=out.device)
    following, next_value = empty(1).zero_(), empty(1).zero_()
    width = max(1, _BLOCK_ELEMENTS // (max(rows, 1) * _STEP)) * _STEP
    terms, sums = empty(width), empty(width)  # one for all blocks: fresh memory takes longer than the sums
    for start in range((longest - 1) // width * width, -1, -width):
        columns = slice(start, min(start + width, longest))
        present = is_token[:, columns]
        count = present.shape[1]
        terms[:, count:] = 0
        terms[:, :count] = torch.where(present, rewards[:, columns], 0.0)
        if values is not None:
            of_tokens = torch.cat([torch.where(present, values[:, columns], 0.0).double(), next_value], dim=1)
            terms[:, :count].add_(of_tokens[:, 1:], alpha=gamma).sub_(of_tokens[:, :-1])
            next_value = of_tokens[:, :1]
        for first in range((count - 1) // _STEP * _STEP, -1, -_STEP):
            step = slice(first, first + _STEP)
            terms[:, step][:, -1:].add_(following, alpha=factor)
            torch.mm(terms[:, step], powers, out=sums[:, step])
            following = sums[:, first : first + 1].clone()
        out[:, columns] = sums[:, :count]


def _powers(factor: float, device: torch.device) -> Tensor:
    """float64 [_STEP, _STEP]: factor^(s − t) in row s and column t, how much a term at s counts at t ≤ s; 0 above."""
    place = torch.arange(_STEP, dtype=torch.float64, device=device)
    distance = place.unsqueeze(1) - place
    return torch.where(distance >= 0, factor ** distance.clamp(min=0), 0.0)
