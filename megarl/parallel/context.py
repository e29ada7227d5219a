"""How context parallelism shares out the tokens of a pack."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def zigzag_positions(bounds: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Which tokens of a pack this context-parallel rank holds.

    Each sequence is cut into 2·size equal chunks and rank r takes chunks r and 2·size−1−r, so that under a causal
    mask every rank has the same work. This is the order Transformer Engine and Megatron-Core's rotary embedding
    expect (Megatron-Core, context parallelism).

    Args:
        bounds: cumulative sequence lengths [sequences + 1], each length divisible by 2·size when size > 1.

    Returns:
        int64 [tokens / size], indices into the pack.

    Raises:
        ValueError: a length that does not divide.
    """
    if size == 1:
        return torch.arange(bounds[-1])
    parts = []
    for start, stop in itertools.pairwise(bounds):
        chunk, rest = divmod(stop - start, 2 * size)
        if rest:
            raise ValueError(f"a sequence of {stop - start} tokens does not divide into {2 * size} context chunks")
        for index in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    return torch.cat(parts)
