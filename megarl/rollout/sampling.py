"""Draws tokens from logits: temperature, top-k, top-p, and random numbers that depend on nothing but their counters.

A token is drawn by inverting the cumulative distribution at one uniform number, so a step needs one random number for
each row rather than one for each row and token, as Gumbel noise would. The number is a hash of (seed, index of the
response, position of the token): no generator state has to follow a row through slots and batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from megarl.rollout.engine import NO_TOP_K, SamplingParams

# The cumulative sum runs over blocks of this many tokens and then inside one, all in float64: a float32 sum over a
# whole vocabulary would move its tail, and a float64 one would be several passes over the widest tensor of the step.
_BLOCK = 256

# Most likely tokens that top-p looks at before it sorts the whole vocabulary.
_TOP_P_CANDIDATES = 1024

# splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN_RATIO = numpy.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (numpy.uint64(30), numpy.uint64(0xBF58476D1CE4E5B9)),
    (numpy.uint64(27), numpy.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT = numpy.uint64(31)
# With 52 bits and not 53, uniform × total stays below total in float64, so the draw never falls off the last token.
_UNIFORM_BITS = 52


def stream_keys(seeds: Sequence[int], indices: Sequence[int]) -> numpy.ndarray:
    """The key of each response's random numbers, [rows] uint64, from its request's seed and its index."""
    mask = 2**64 - 1
    seed = _splitmix(numpy.array([seed & mask for seed in seeds], dtype=numpy.uint64))
    return _splitmix(seed + numpy.array(indices, dtype=numpy.uint64))


def uniforms(keys: numpy.ndarray, positions: Sequence[int]) -> Tensor:
    """One number in [0, 1) for each row, [rows] float64.

    Args:
        keys: [rows] as `stream_keys` gives them.
        positions: which token of the response is drawn, from 0.
    """
    bits = _splitmix(keys + numpy.array(positions, dtype=numpy.uint64) * _GOLDEN_RATIO)
    return torch.from_numpy((bits >> numpy.uint64(64 - _UNIFORM_BITS)).astype(numpy.float64) * 2.0**-_UNIFORM_BITS)


def _splitmix(state: numpy.ndarray) -> numpy.ndarray:
    state = state + _GOLDEN_RATIO
    for shift, factor in _MIX:
        state = (state ^ (state >> shift)) * factor
    return state ^ (state >> _LAST_SHIFT)


@torch.inference_mode()
def draw(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one token for each row.

    Args:
        logits: [rows, vocabulary] float32; overwritten.
        params: of each row.
        uniform: [rows] float64 in [0, 1).

    Returns:
        Tokens, [rows] int64, and their log-probs as `Response.logprobs` defines them, [rows] float32; a log-prob that
        is not finite says that the row's logits were not.
    """
    uniform = uniform.to(logits.device)
    divisors = [1.0 if row.is_greedy else row.temperature for row in params]
    if any(divisor != 1.0 for divisor in divisors):
        logits.div_(torch.tensor(divisors, device=logits.device).unsqueeze(1))
    kinds: dict[str, list[int]] = {}
    for row, sampling in enumerate(params):
        kinds.setdefault(_kind(sampling), []).append(row)
    if len(kinds) == 1:
        return _draw_kind(next(iter(kinds)), logits, params, uniform)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(params), dtype=torch.float32, device=logits.device)
    for kind, members in kinds.items():
        rows = torch.tensor(members, device=logits.device)
        tokens[rows], logprobs[rows] = _draw_kind(kind, logits[rows], [params[row] for row in members], uniform[rows])
    return tokens, logprobs


def _kind(params: SamplingParams) -> str:
    if params.is_greedy:
        return "greedy"
    return "whole" if params.top_k == NO_TOP_K and params.top_p == 1.0 else "cut"


def _draw_kind(kind: str, logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "cut":
        return _draw_cut(logits, params, uniform)
    peak, best = logits.max(dim=1, keepdim=True)
    weights = logits.sub_(peak).exp_()
    if kind == "greedy":
        return best.squeeze(1), -weights.sum(dim=1).log()
    return _invert(weights, uniform)


def _draw_cut(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> tuple[Tensor, Tensor]:
    vocabulary = logits.shape[1]
    top_k = torch.tensor(
        [vocabulary if row.top_k == NO_TOP_K else min(row.top_k, vocabulary) for row in params], device=logits.device
    ).unsqueeze(1)
    # Above 1 where nothing is to be cut: a rounded cumulative sum may reach 1 before the last token.
    top_p = torch.tensor([row.top_p if row.top_p < 1 else 2.0 for row in params], dtype=torch.float64)
    top_p = top_p.to(logits.device).unsqueeze(1)
    values, tokens = _candidates(logits, top_k, top_p)
    rank = torch.arange(values.shape[1], device=logits.device)
    weights = (values - values[:, :1]).exp().masked_fill(rank >= top_k, 0.0)
    # top-p is of the distribution that top-k left; where there is no top-k, of the whole one, candidates or not.
    total = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    whole = (logits - values[:, :1]).exp().sum(dim=1, keepdim=True, dtype=torch.float64)
    probabilities = weights.double() / torch.where(top_k < vocabulary, total, whole)
    above = probabilities.cumsum(dim=1) - probabilities
    weights = weights.masked_fill((above >= top_p) & (rank > 0), 0.0)
    position, logprobs = _invert(weights, uniform)
    return tokens.gather(1, position.unsqueeze(1)).squeeze(1), logprobs


def _candidates(logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each row in falling order, as many as the widest cut needs: logits and tokens."""
    vocabulary = logits.shape[1]
    by_k = (top_k < vocabulary).squeeze(1)
    count = int(top_k[by_k].max()) if by_k.any() else 1
    if not by_k.all():
        count = min(vocabulary, max(count, _TOP_P_CANDIDATES))
    values, tokens = logits.topk(count, dim=1)
    mass = (values.logsumexp(dim=1).double() - logits.logsumexp(dim=1).double()).exp()
    if count < vocabulary and bool(((mass < top_p.squeeze(1)) & ~by_k).any()):
        return logits.sort(dim=1, descending=True)
    return values, tokens


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Columns at which the cumulative sums of weights, [rows, columns] float32, pass `uniform`, and their log-probs."""
    columns = weights.shape[1]
    full = columns // _BLOCK * _BLOCK
    sums = weights[:, :full].unflatten(1, (-1, _BLOCK)).sum(dim=2)
    if full < columns:
        sums = torch.cat([sums, weights[:, full:].sum(dim=1, keepdim=True)], dim=1)
    block, rest, total = _pass(sums, uniform)
    column = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, column.clamp(max=columns - 1)).masked_fill(column >= columns, 0.0)
    offset, _, _ = _pass(inside, rest.squeeze(1))
    # Weights that are NaN pass nowhere; their column must still be one, for the NaN to show in the log-prob.
    token = (block * _BLOCK + offset).squeeze(1).clamp(max=columns - 1)
    chosen = inside.gather(1, offset).squeeze(1)
    return token, (chosen.double() / total.squeeze(1)).log().float()


def _pass(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the cumulative sums pass a share of their total.

    Returns:
        The column, how far into it the share lies, in [0, 1), and the total; each [rows, 1].
    """
    sums = weights.cumsum(dim=1, dtype=torch.float64)
    total = sums[:, -1:]
    target = uniform.unsqueeze(1) * total
    # The first sum *above* the target: a column of weight 0 cannot be the first.
    column = torch.searchsorted(sums, target, right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.gather(1, column).double()
    rest = (target - (sums.gather(1, column) - weight)) / weight
    return column, rest.clamp(0.0, 1.0 - 2.0**-_UNIFORM_BITS), total
