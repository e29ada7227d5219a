"""Log-probs of the chosen tokens and the entropy of the distribution, from logits split over the vocabulary.

The logits are the largest tensor of a training step ([tokens, vocabulary]: 1.2 GB in float32 for 2,048 tokens of a
151,936-token vocabulary), so no second copy of them may exist. The forward pass walks over chunks of tokens with two
small float32 buffers and keeps five numbers a token; the backward pass writes the gradient *into the logits' own
storage*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CACHE_SIZED_CHUNK_BYTES = 4 * 2**20
"""A chunk whose two buffers stay in the cache of a CPU, where every pass after the first is then several times faster.
A GPU wants chunks some sixty times larger: there a kernel launch costs more than a pass over 4 MiB."""

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)

_UNDERFLOW_BITS = -200.0
"""2**-200 is exactly 0 in float32 (the smallest subnormal is 2**-149). Exponents are clamped here so that a logit of
-inf gives 0 · finite = 0 in `p · log p`, not 0 · inf = NaN."""

_STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def vocab_parallel_logprobs_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    entropy: bool = True,
    chunk_bytes: int = CACHE_SIZED_CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and H(p) of p = softmax(logits / temperature), for every token, in float32.

    Rank r of `group` holds columns [r · shard, (r + 1) · shard). Columns at or above `vocab_size` are padding: they
    have no part in the softmax and get a zero gradient. Two collectives in all (three numbers a token), none in a
    group of one.

    The backward pass **overwrites the logits with their gradient**, so it can run once (`retain_graph=True` and a
    second pass raise) and the logits must not be read after it. If another operation saved them for its own backward
    (a soft cap does not: it saves its own output), autograd raises "modified by an inplace operation". Without
    gradients the logits stay as they are.

    Peak extra memory: 2 · `chunk_bytes` + about 60 bytes a token, forward and backward.

    Args:
        logits: [tokens, shard], contiguous, float32, bfloat16 or float16; not a leaf if it needs a gradient.
        targets: [tokens] int64, ids of the whole vocabulary; the same on every rank of `group`.
        vocab_size: the true vocabulary size, without padding.
        group: the tensor-parallel group; None is a single process, never the default group.
        temperature: divides the logits; the gradient includes it.
        entropy: False leaves the entropy out (None is returned for it).
        chunk_bytes: size of one of the two float32 buffers; rounded to whole tokens, at least one.

    Returns:
        (log-probs [tokens], entropy [tokens] in nats or None), float32, the same on every rank of `group`.

    Raises:
        ValueError: a shape, dtype, size or temperature that cannot be right.
        RuntimeError: a target outside [0, vocab_size); a second backward pass.
    """
    group = group if group is not None and dist.get_world_size(group) > 1 else None
    _check(logits, targets, vocab_size, group, temperature)
    if entropy:
        logprobs, entropies = _LogprobsEntropy.apply(
            logits, targets, vocab_size, group, temperature, entropy, chunk_bytes
        )
        return logprobs, entropies
    return _LogprobsEntropy.apply(logits, targets, vocab_size, group, temperature, entropy, chunk_bytes), None


def _check(
    logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup | None, temperature: float
) -> None:
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"logits must be [tokens, vocabulary shard] and targets [tokens] int64, not {list(logits.shape)} and "
            f"{list(targets.shape)} {targets.dtype}"
        )
    if logits.dtype not in _STORED_DTYPES:
        raise ValueError(f"logits must be float32, bfloat16 or float16, not {logits.dtype}")
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous, because their storage receives the gradient; call .contiguous()")
    if logits.requires_grad and logits.is_leaf:
        raise ValueError(
            "logits is a leaf tensor whose values the backward pass would overwrite with their gradient; pass the "
            "output of an operation"
        )
    ranks = 1 if group is None else dist.get_world_size(group)
    columns = logits.shape[1] * ranks
    if not 0 < vocab_size <= columns:
        raise ValueError(f"vocab_size is {vocab_size}, but the logits of {ranks} rank(s) have {columns} columns")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    if len(targets):
        # Asynchronous on a GPU: reading the answer back would stop the queue once a micro-batch.
        smallest, largest = torch.aminmax(targets)
        torch._assert_async(
            (smallest >= 0) & (largest < vocab_size), f"targets hold an id outside the vocabulary, [0, {vocab_size})"
        )


class _LogprobsEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float,
        entropy: bool,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor] | Tensor:
        tokens, shard = logits.shape
        first = 0 if group is None else dist.get_rank(group) * shard
        columns = min(max(vocab_size - first, 0), shard)
        owned = (targets >= first) & (targets < first + columns)
        local_targets = torch.where(owned, targets - first, 0).unsqueeze(1)

        maxima, sums = _local_sums(logits[:, :columns], temperature, entropy, chunk_bytes)
        largest = maxima.clone()
        if group is not None and tokens:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        _rebase(sums, maxima, largest, temperature)
        # Row 1: the target's logit, from the one rank that has it.
        target_logits = logits.gather(1, local_targets).squeeze(1).float()
        sums[1] = torch.where(owned, target_logits - largest, 0.0)
        if group is not None and tokens:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)

        log_normalisers = sums[0].log()
        logprobs = sums[1] / temperature - log_normalisers
        mean_exponents = sums[2] / sums[0] if entropy else None
        ctx.overwritten = False
        ctx.columns, ctx.temperature, ctx.chunk_bytes = columns, temperature, chunk_bytes
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, local_targets, owned, largest, sums[0], mean_exponents)
        ctx.set_materialize_grads(False)
        if mean_exponents is None:
            return logprobs
        return logprobs, log_normalisers - _LN_2 * mean_exponents

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """∂(g·log p_t + h·H)/∂x_j = (g·[j = t] − p_j·(g + h·(log p_j + H))) / T."""
        if ctx.overwritten:
            raise RuntimeError(
                "the logits were overwritten with their gradient by the first backward pass; add the losses of "
                "log-probs and entropy and call backward once, without retain_graph"
            )
        logits, local_targets, owned, largest, normalisers, mean_exponents = ctx.saved_tensors
        ctx.overwritten = True
        # log p_j + H = ln 2 · (d_j − mean d): the exponents d from the largest logit are exact where log p is not.
        grad_logprobs, grad_entropy = grads[0], grads[1] if len(grads) == 2 else None
        constant = torch.zeros_like(normalisers)
        slope = None
        if grad_logprobs is not None:
            constant -= grad_logprobs
        if grad_entropy is not None:
            constant += _LN_2 * grad_entropy * mean_exponents
            slope = (-_LN_2 / ctx.temperature * grad_entropy / normalisers).unsqueeze(1)
        constant = (constant / normalisers / ctx.temperature).unsqueeze(1)
        at_target = None
        if grad_logprobs is not None:
            at_target = torch.where(owned, grad_logprobs / ctx.temperature, 0.0).unsqueeze(1)

        # detach() shares the version counter, so autograd notices if another operation still needs the logits.
        gradient = logits.detach()
        inside, padding = gradient[:, : ctx.columns], gradient[:, ctx.columns :]
        for rows, exponents, powers in _chunks(inside, ctx.chunk_bytes):
            exponents.copy_(inside[rows])
            _exponentiate(exponents, powers, largest[rows], ctx.temperature)
            if slope is None:
                chunk = powers.mul_(constant[rows])
            else:
                chunk = exponents.mul_(slope[rows]).add_(constant[rows]).mul_(powers)
            if at_target is not None:
                chunk.scatter_add_(1, local_targets[rows], at_target[rows])
            inside[rows].copy_(chunk)
        padding.zero_()
        return gradient, None, None, None, None, None, None


def _local_sums(logits: Tensor, temperature: float, entropy: bool, chunk_bytes: int) -> tuple[Tensor, Tensor]:
    """One pass over this rank's logits [tokens, columns].

    Returns:
        (maxima [tokens], sums [3 or 2, tokens]): the largest logit of each token; and, with exponents
        d = (logit − largest) / T in bits, Σ 2^d in row 0 and, with `entropy`, Σ 2^d · d in row 2. Row 1 is left
        for the caller.
    """
    tokens = len(logits)
    # The lowest finite number instead of -inf: a shard of nothing but padding has no largest logit.
    maxima = logits.new_full((tokens,), torch.finfo(torch.float32).min, dtype=torch.float32)
    sums = logits.new_zeros((3 if entropy else 2, tokens), dtype=torch.float32)
    for rows, exponents, powers in _chunks(logits, chunk_bytes):
        exponents.copy_(logits[rows])
        torch.maximum(maxima[rows], exponents.amax(dim=1), out=maxima[rows])
        _exponentiate(exponents, powers, maxima[rows], temperature)
        torch.sum(powers, dim=1, out=sums[0, rows])
        if entropy:
            torch.sum(powers.mul_(exponents), dim=1, out=sums[2, rows])
    return maxima, sums


def _rebase(sums: Tensor, maxima: Tensor, largest: Tensor, temperature: float) -> None:
    """Changes `sums` in place from exponents below this rank's `maxima` to exponents below the group's `largest`."""
    shift = ((maxima - largest) * (_LOG2_E / temperature)).clamp_(min=_UNDERFLOW_BITS)
    if len(sums) == 3:
        sums[2] += sums[0] * shift
        sums[2] *= shift.exp2()
    sums[0] *= shift.exp2()


def _exponentiate(exponents: Tensor, powers: Tensor, largest: Tensor, temperature: float) -> None:
    """exponents ← (exponents − largest) / T in bits; powers ← 2^exponents.

    Base 2 because exp2 is nearly four times as fast as exp on a CPU. Subtracting before scaling keeps the difference
    of two large logits exact.
    """
    exponents.sub_(largest.unsqueeze(1)).mul_(_LOG2_E / temperature).clamp_(min=_UNDERFLOW_BITS)
    torch.exp2(exponents, out=powers)


def _chunks(logits: Tensor, chunk_bytes: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, buffer, buffer) for consecutive chunks of `logits`; the float32 buffers are the same memory each time."""
    tokens, columns = logits.shape
    if columns == 0:
        return
    chunk = min(max(chunk_bytes // (4 * columns), 1), tokens)
    buffers = torch.empty(2, chunk, columns, dtype=torch.float32, device=logits.device)
    for start in range(0, tokens, max(chunk, 1)):
        size = min(chunk, tokens - start)
        yield slice(start, start + size), buffers[0, :size], buffers[1, :size]
