"""How much of the hardware a step used: model FLOPs, their share of the peak (MFU), tokens a second, memory.

Model FLOPs are those that the mathematics needs. Activation recomputation, padding and log-probs computed twice cost
time and are not counted, so that MFU falls where work is wasted (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megarl import platform
from megarl.config import ModelShape
from megarl.parallel.balance import sequence_flops
from megarl.platform.usage import peak_memory_bytes, synchronize

UPDATE_PASSES = 3
"""Forward passes that an update amounts to: backward computes two matrix products for each of forward's."""

_GIB = 1024**3
_SMALLEST_PRODUCT = 256
_LARGEST_PRODUCT = 8192
"""Width of the matrices whose product shows the peak. The largest is enough for any GPU; a CPU stops before it."""
_PRODUCTS = 3
_PEAK_BUDGET_S = 0.4
"""Measuring stops growing the matrices where the next size would take longer than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlops:
    """Floating-point operations that the passes of one model need, from the lengths of sequences in tokens."""

    shape: ModelShape

    def forward(self, lengths: Iterable[int]) -> int:
        """One forward pass over whole sequences: log-probs, values."""
        return sum(sequence_flops(length, self.shape) for length in lengths)

    def update(self, lengths: Iterable[int]) -> int:
        """One forward and backward pass. Several epochs over the sequences are as many updates."""
        return UPDATE_PASSES * self.forward(lengths)

    def generation(self, prompts: Sequence[int], responses: Sequence[int], *, samples_per_prompt: int) -> int:
        """Generating with a KV cache: each prompt prefilled once for its group, then each response token once.

        Args:
            prompts: tokens of the prompt of each sample, so that a prompt is there as often as it has samples.
            responses: tokens of the response of each sample.
            samples_per_prompt: size of a group.

        Raises:
            ValueError: there are not as many prompts as responses.
        """
        whole = self.forward(prompt + response for prompt, response in zip(prompts, responses, strict=True))
        prompts_alone = self.forward(prompts)
        # Nobody needs the logits inside a prompt: without them a small model with a large vocabulary saves a fifth.
        logits = 2 * self.shape.hidden_size * self.shape.vocab_size * sum(prompts)
        return whole - prompts_alone + (prompts_alone - logits) // samples_per_prompt


def performance(
    *, flops: float, tokens: float, seconds: float, world_size: int, peak_tflops: float
) -> dict[str, float]:
    """The `perf/` metrics of a step.

    Args:
        flops: model FLOPs of the step over all ranks.
        tokens: prompt and response tokens of the step over all ranks.
        seconds: wall-clock time of the step.
        peak_tflops: of one rank's device, `observe.peak_tflops` or `measure_peak_tflops`.

    Returns:
        verl's `perf/total_num_tokens`, `perf/time_per_step` and `perf/throughput` (tokens a second and rank), with
        `perf/tokens_per_s` (all ranks), `perf/mfu` (0 to 1) and `perf/max_memory_gb` (GiB, of the calling rank).
    """
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/throughput": tokens / seconds / world_size,
        "perf/mfu": flops / (seconds * peak_tflops * 1e12 * world_size),
        "perf/max_memory_gb": peak_memory_bytes() / _GIB,
    }


@functools.cache
def measure_peak_tflops(dtype: torch.dtype) -> float:
    """The most that this rank reaches in square matrix products of `dtype`, in 10^12 operations a second.

    Takes less than a second, once in the life of the process. It runs on the threads and with the precision that the
    run has. Ranks that share the cores of a CPU should measure at the same time, each its share; that is what the
    sum over ranks then means.
    """
    device = platform.current().device
    size, peak, seconds = _SMALLEST_PRODUCT, 0.0, 0.0
    # A product of twice the width takes eight times as long.
    while size <= _LARGEST_PRODUCT and 8 * seconds * (1 + _PRODUCTS) < _PEAK_BUDGET_S:
        matrix = torch.randn(size, size, device=device).to(dtype)
        seconds = min(_seconds_of_product(matrix) for _ in range(1 + _PRODUCTS))  # the first one warms up
        peak = max(peak, 2 * size**3 / seconds / 1e12)
        size *= 2
    return peak


def _seconds_of_product(matrix: torch.Tensor) -> float:
    synchronize()
    start = time.perf_counter()
    torch.matmul(matrix, matrix)
    synchronize()
    return time.perf_counter() - start
