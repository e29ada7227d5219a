"""How many micro-batches a pipeline stage holds at once, from the order in which Megatron-Core runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.config.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class PassBytes:
    """Bytes of one micro-batch on one virtual pipeline stage."""

    layers: float
    """That the layers keep from the forward pass until the backward pass."""
    head: float = 0.0
    """That the head keeps: the backward pass begins with it, and frees it before the layers' turn comes."""
    recomputed: float = 0.0
    """That exist for a moment in the backward pass, where parts of a layer are computed again."""


def peak_in_flight(layout: Layout, stage: int, micro_batches: int, chunks: Sequence[PassBytes]) -> float:
    """The most bytes that a stage holds for backward passes at once.

    Args:
        micro_batches: of one optimizer step.
        chunks: of each virtual stage.
    """
    held = peak = 0.0
    for number, is_forward in _passes(layout, stage, min(micro_batches, _steady_after(layout))):
        chunk = chunks[number]
        if is_forward:
            held += chunk.layers + chunk.head
            peak = max(peak, held)
        else:
            peak = max(peak, held - chunk.head + chunk.recomputed)
            held -= chunk.layers + chunk.head
    return peak


def bubble(layout: Layout, micro_batches: int) -> float:
    """Time that stages wait for one another, as a share of the time that they compute (arXiv:2104.04473, 2.2)."""
    return (layout.pp - 1) / (micro_batches * layout.vpp)


def _steady_after(layout: Layout) -> int:
    """Micro-batches after which the schedule only repeats itself."""
    return 4 * layout.pp


def _passes(layout: Layout, stage: int, micro_batches: int) -> Iterator[tuple[int, bool]]:
    """(chunk, whether forward) of each pass, as `get_pp_rank_microbatches` of Megatron-Core 0.16.1 orders them."""
    total = micro_batches * layout.vpp
    later = layout.pp - stage - 1
    warmup = min(2 * later + (layout.vpp - 1) * layout.pp if layout.vpp > 1 else later, total)
    for done in range(warmup):
        yield _chunk_of(layout, done), True
    for done in range(warmup, total):
        yield _chunk_of(layout, done), True
        yield layout.vpp - 1 - _chunk_of(layout, done - warmup), False
    for done in range(total - warmup, total):
        yield layout.vpp - 1 - _chunk_of(layout, done), False


def _chunk_of(layout: Layout, number: int) -> int:
    """The chunk of a stage's forward pass by number: `pp` micro-batches through one chunk, then through the next."""
    return number % (layout.pp * layout.vpp) // layout.pp
