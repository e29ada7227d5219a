"""Routers of mixtures of experts: what Megatron-Core 0.16.1 counts, and what a padding token is to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megarl.data.packing import PackedBatch
from megarl.parallel.groups import Groups


def expert_biases(chunks: list[Any]) -> list[torch.Tensor]:
    """float32 [experts] of each router that has a bias for balance (arXiv:2408.15664), on this rank."""
    return [router.expert_bias for router in routers(chunks) if router.expert_bias is not None]


def count_real_tokens(chunk: torch.nn.Module) -> None:
    """Makes the routers of a chunk leave padding out of what their expert bias follows.

    Megatron-Core combines a mask of [tokens] with a map of [tokens, experts] (`moe/router.py`, `_apply_expert_bias`),
    which raises, or where both sizes are equal masks experts instead of tokens.
    """
    for router in routers([chunk]):
        router._apply_expert_bias = _CountOfRealTokens(router._apply_expert_bias)


class _CountOfRealTokens:
    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        self._original(routing_map, padding_mask=None if padding_mask is None else padding_mask.unsqueeze(1))


def padding_mask(groups: Groups, chunk: Any, shard: PackedBatch) -> torch.Tensor | None:
    """bool [1, tokens], true on padding: what a chunk's forward takes; None for a dense model.

    Megatron-Core's own description has true and false the other way round; its code does not. Under sequence
    parallelism it hands a rank its tokens on the first stage only, so other stages are given theirs here.
    """
    inner = getattr(chunk, "module", chunk)  # of the data-parallel wrapper
    if inner.config.num_moe_experts is None:
        return None
    mask = shard.is_padding if inner.pre_process else tokens_of_routers(groups, shard.is_padding)
    return mask.unsqueeze(0)


def tokens_of_routers(groups: Groups, tokens: torch.Tensor) -> torch.Tensor:
    """[tokens of this context-parallel rank, …] → [tokens of this rank's routers, …]: those that sequence parallelism
    leaves it."""
    if not groups.layout.sequence_parallel:
        return tokens
    return tokens.chunk(groups.tp.size())[groups.tp.rank()]


def routers(chunks: Sequence[Any]) -> Iterator[Any]:
    """Megatron-Core's routers of these chunks, in the order of layers."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))
