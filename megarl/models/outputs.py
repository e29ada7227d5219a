"""What the last stage's output becomes: log-probs and entropy of each token, or its value."""

from __future__ import annotations

import torch

from megarl import platform
from megarl.data.packing import IGNORED_TARGET, PackedBatch
from megarl.models.build import MegatronModel
from megarl.models.logprobs import vocab_parallel_logprobs_entropy


def token_logprobs(
    model: MegatronModel,
    logits: torch.Tensor,
    shard: PackedBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each token's successor, and the entropy of its distribution.

    The backward pass overwrites `logits` (`models.logprobs`).

    Args:
        logits: [selected tokens, vocabulary ÷ tp], as `run_pipeline` gives them.
        shard: the micro-batch of this context-parallel rank.

    Returns:
        float32 [tokens] each, in the shard's order: position i holds the log-prob of target i, and 0 where there is
        no target. Entropy is None if not asked for.
    """
    selected = shard.selected
    targets = shard.targets[selected]
    logprobs, entropies = vocab_parallel_logprobs_entropy(
        logits,
        targets.clamp(min=0),
        vocab_size=model.vocab_size,
        group=model.groups.tp,
        temperature=temperature,
        entropy=entropy,
        chunk_bytes=platform.current().chunk_bytes,
    )

    def spread(values: torch.Tensor) -> torch.Tensor:
        wanted = torch.where(targets != IGNORED_TARGET, values, torch.zeros_like(values))
        return wanted.new_zeros(shard.targets.shape).index_copy(0, selected, wanted)

    return spread(logprobs), None if entropies is None else spread(entropies)


def token_values(values: torch.Tensor) -> torch.Tensor:
    """[tokens, 1] of a scalar head → float32 [tokens]."""
    return values.squeeze(-1).float()
