"""Core attention in plain torch: packed sequences, context parallelism, any head sizes."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from megarl.parallel.context import zigzag_positions


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a pack, by `torch.nn.functional.scaled_dot_product_attention`.

    Megatron's own DotProductAttention refuses packing, context parallelism and MLA's unequal head sizes. Sequences are
    taken one by one, or several of one length: a mask over the whole pack costs its square in memory, and time (7× at
    8 × 256 tokens on a CPU).

    With context parallelism each rank holds chunks r and 2·cp−1−r of every sequence (`zigzag_positions`); keys and
    values are gathered over the group, and their gradients reduce-scattered.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise NotImplementedError(f"attention dropout of {dropout} is not supported; RL and SFT train with 0")
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attends within each sequence.

        Args:
            query: [tokens, heads, head size]; key, value: [tokens, key-value heads, head size], this rank's tokens.
            packed_seq_params: `cu_seqlens_q` counts tokens before the split over context-parallel ranks; padding
                inside a sequence is at its end, where causal attention keeps it from every real token.

        Returns:
            [tokens, heads · value head size]
        """
        if packed_seq_params is None or attention_bias is not None:
            raise NotImplementedError("the torch backend attends over packed sequences without a bias only")
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        lengths = [stop - start for start, stop in itertools.pairwise(bounds) if stop > start]
        if self.cp_group.size() == 1:
            parts = self._runs(query, key, value, lengths)
        else:
            parts = self._context_parallel(query, key, value, bounds)
        return torch.cat(parts).flatten(1)

    def _runs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> list[torch.Tensor]:
        """Neighbours of one length in one call: of short sequences, calls cost more than what they compute."""
        runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
        tokens = [length * count for length, count in runs]
        return [
            self._attend(*(x.unflatten(0, (count, length)) for x in qkv), is_causal=True).flatten(0, 1)
            for (length, count), *qkv in zip(
                runs, query.split(tokens), key.split(tokens), value.split(tokens), strict=True
            )
        ]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **mask: Any) -> torch.Tensor:
        """[sequences, tokens, heads, size] each; all heads of sequences of one length."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1), **mask
        )
        return out.transpose(1, 2)

    def _context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: tuple[int, ...]
    ) -> list[torch.Tensor]:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        order = _natural_order(bounds, size, query.device)
        key, value = (_GatherTokens.apply(x, self.cp_group).index_select(0, order) for x in (key, value))
        parts, taken = [], 0
        for start, stop in itertools.pairwise(bounds):
            chunk = (stop - start) // (2 * size)
            for index in (rank, 2 * size - 1 - rank):
                seen = (index + 1) * chunk
                # The chunk is the last `chunk` of the `seen` keys, so the causal diagonal starts seen − chunk in.
                mask = torch.ones(chunk, seen, dtype=torch.bool, device=query.device).tril(seen - chunk)
                queries, keys, values = (
                    query[taken : taken + chunk],
                    key[start : start + seen],
                    value[start : start + seen],
                )
                out = self._attend(*(x.unsqueeze(0) for x in (queries, keys, values)), attn_mask=mask)
                parts.append(out.squeeze(0))
                taken += chunk
        return parts


@lru_cache(maxsize=64)
def _natural_order(bounds: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """[tokens] index that puts tokens gathered rank after rank back into the order of the pack."""
    gathered = torch.cat([zigzag_positions(bounds, size, rank) for rank in range(size)])
    return gathered.argsort().to(device)


class _GatherTokens(torch.autograd.Function):
    """All-gather along tokens; the backward sums each rank's share of the gradient over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.new_empty((x.size(0) * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        out = grad.new_empty((grad.size(0) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
