"""Packed micro-batches: sequences laid end to end, so that (nearly) no padding is computed.

A pack is the same on every rank of a model-parallel group; `PackedBatch.shard` takes the tokens of one
context-parallel rank, which is what a model runs on. Padding is of two kinds, both made of tokens that no loss reads:
a few tokens at the end of a sequence, so that it divides into context chunks, and sequences of padding at the end of
the pack, so that it has the length that pipeline stages agreed on. Causal attention keeps both from every real token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from megarl.config.layout import Layout
from megarl.parallel.context import zigzag_positions

PAD_TOKEN = 0
"""What fills padding. Any id serves: no loss reads it and no real token attends to it."""

IGNORED_TARGET = -1
"""The target where a position has none: the last token of each sequence, and padding."""

_LONGEST_PADDING_SEQUENCE = 128
"""Attention costs a sequence's square, so padding is cut into short sequences."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch: whole sequences laid end to end. Tensors are on the CPU until `to`."""

    input_ids: torch.Tensor
    """int64 [tokens]"""
    targets: torch.Tensor
    """int64 [tokens]: the next token of the same sequence where its log-prob is wanted, IGNORED_TARGET elsewhere"""
    positions: torch.Tensor
    """int64 [tokens]: from 0 in each sequence"""
    is_padding: torch.Tensor
    """bool [tokens]: of no sequence"""
    cu_seqlens: torch.Tensor
    """int32 [sequences + padding sequences + 1]: bounds in tokens, inner padding included"""
    lengths: tuple[int, ...]
    """Real tokens of each sequence."""
    rows: tuple[int, ...]
    """Which rows of the batch these sequences are."""
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further float32 values [tokens], such as masks, advantages or old log-probs; 0 on padding."""
    routed_experts: torch.Tensor | None = None
    """int16 [tokens, mixtures, top-k]: experts that routers are to choose for a token, -1 where they choose themselves.
    It stays on the CPU until its micro-batch runs."""

    @cached_property
    def selected(self) -> torch.Tensor:
        """int64 [selected]: the positions that have a target. The first, where none has: layers want a token."""
        positions = (self.targets != IGNORED_TARGET).nonzero().squeeze(1)
        return positions if positions.numel() else positions.new_zeros(1)

    @property
    def total_tokens(self) -> int:
        """Of the whole pack, padding included; a shard has that divided by the context-parallel size."""
        return self.bounds[-1]

    def with_columns(self, **columns: torch.Tensor) -> PackedBatch:
        """A copy that has these per-token values too."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        return tuple(self.cu_seqlens.tolist())

    def shard(self, cp_size: int, cp_rank: int) -> PackedBatch:
        """The tokens of one context-parallel rank; `cu_seqlens` still counts the whole pack, as attention needs."""
        if cp_size == 1:
            return self
        index = zigzag_positions(self.bounds, cp_size, cp_rank)
        routed_experts = None if self.routed_experts is None else self.routed_experts[index]
        return dataclasses.replace(self._map(lambda tensor: tensor[index]), routed_experts=routed_experts)

    def sequence_of_token(self, cp_size: int, cp_rank: int) -> torch.Tensor:
        """int64 [tokens of this context-parallel rank]: which sequence of the pack each belongs to, those of padding
        included."""
        sizes = torch.tensor([stop - start for start, stop in itertools.pairwise(self.bounds)])
        of_token = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        return of_token if cp_size == 1 else of_token[zigzag_positions(self.bounds, cp_size, cp_rank)]

    def to(self, device: str) -> PackedBatch:
        """This batch with its per-token tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
        """Applies `change` to what every pass reads of a token. `cu_seqlens` stays: the bounds of the whole pack."""
        return dataclasses.replace(
            self,
            input_ids=change(self.input_ids),
            targets=change(self.targets),
            positions=change(self.positions),
            is_padding=change(self.is_padding),
            columns={name: change(column) for name, column in self.columns.items()},
        )

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Splits per-token values of the whole pack [tokens, …] into one tensor [length, …] a sequence."""
        return [values[start : start + n] for start, n in zip(self.bounds, self.lengths, strict=False)]


def sequence_multiple(layout: Layout) -> int:
    """A sequence's length in a pack is a multiple of this: two chunks for each context-parallel rank."""
    return 2 * layout.cp if layout.cp > 1 else 1


def pack_multiple(layout: Layout) -> int:
    """A pack's length is a multiple of this: context chunks that sequence parallelism can split again."""
    return sequence_multiple(layout) * (layout.tp if layout.sequence_parallel else 1)


def padded_length(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def pack_sequences(
    sequences: Sequence[torch.Tensor],
    layout: Layout,
    *,
    rows: Sequence[int] | None = None,
    first_targets: Sequence[int] | None = None,
    columns: dict[str, Sequence[torch.Tensor]] | None = None,
    num_tokens: int | None = None,
    routed_experts: Sequence[torch.Tensor] | None = None,
) -> PackedBatch:
    """Lays sequences end to end.

    Args:
        sequences: int64 [length] each, length ≥ 1. May be empty when `num_tokens` is given: a pack of padding, for
            ranks that have fewer micro-batches than others.
        rows: the index of each sequence in its batch, 0, 1, … if not given.
        first_targets: the index in each sequence of the first token whose log-prob is wanted, such as the number of its
            prompt tokens; 1 if not given.
        columns: float32 values [length] of each sequence, packed along.
        num_tokens: the length to pad to (a multiple of `pack_multiple`); the least that fits if not given.
        routed_experts: int16 [length, mixtures, top-k] of each sequence (`PackedBatch.routed_experts`).

    Raises:
        ValueError: a sequence without tokens, or sequences that do not fit into `num_tokens`.
    """
    inner = sequence_multiple(layout)
    lengths = [sequence.numel() for sequence in sequences]
    if 0 in lengths:
        raise ValueError(f"sequence {lengths.index(0)} has no tokens")
    padded = [padded_length(length, inner) for length in lengths]
    used = sum(padded)
    total = padded_length(used, pack_multiple(layout)) if num_tokens is None else num_tokens
    if used > total:
        raise ValueError(f"{len(lengths)} sequences take {used} tokens, more than the {total} of the micro-batch")
    bounds = _bounds(padded + _padding_sequences(total - used, inner))

    input_ids = torch.full((total,), PAD_TOKEN, dtype=torch.int64)
    targets = torch.full((total,), IGNORED_TARGET, dtype=torch.int64)
    positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(bounds)])
    is_padding = torch.ones(total, dtype=torch.bool)
    packed = {name: torch.zeros(total) for name in columns or ()}
    experts = routed_experts[0].new_full((total, *routed_experts[0].shape[1:]), -1) if routed_experts else None
    for index, (start, sequence, length) in enumerate(zip(bounds, sequences, lengths, strict=False)):
        input_ids[start : start + length] = sequence
        is_padding[start : start + length] = False
        first = 1 if first_targets is None else first_targets[index]
        targets[start + first - 1 : start + length - 1] = sequence[first:]
        for name, column in packed.items():
            column[start : start + length] = columns[name][index]  # type: ignore[index]
        if experts is not None:
            experts[start : start + length] = routed_experts[index]  # type: ignore[index]
    return PackedBatch(
        input_ids=input_ids,
        targets=targets,
        positions=positions,
        is_padding=is_padding,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        lengths=tuple(lengths),
        rows=tuple(range(len(lengths)) if rows is None else rows),
        columns=packed,
        routed_experts=experts,
    )


def _bounds(lengths: Sequence[int]) -> list[int]:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def _padding_sequences(tokens: int, multiple: int) -> list[int]:
    """Lengths of padding sequences that sum to `tokens`, which is a multiple of `multiple`."""
    longest = max(multiple, _LONGEST_PADDING_SEQUENCE // multiple * multiple)
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + ([rest] if rest else [])
