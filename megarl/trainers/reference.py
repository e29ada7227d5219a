"""Log-probs of responses under the reference model: the weights that a run starts from, before they move.

They are computed once and kept in the run's folder, so that no second model is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from megarl.config import ModelShape, RunConfig
from megarl.models.build import MegatronModel
from megarl.trainers.kept import kept_or_computed, model_checksum
from megarl.trainers.minibatch import Row
from megarl.trainers.scoring import logprob_sums_everywhere
from megarl.trainers.sft import MASK

_EXAMPLES_AT_ONCE = 1024
"""Examples whose tokens are in memory at a time."""

RowsOf = Callable[[Sequence[int]], list[tuple[Row, ...]]]
"""From numbers of examples to the sequences of each, equally many, with the column `MASK`."""


def reference_logprobs(
    config: RunConfig, model: MegatronModel, name: str, size: int, rows_of: RowsOf
) -> tuple[torch.Tensor, str | None]:
    """The log-prob of the response in each sequence of each example. Collective over the world.

    Args:
        model: with the weights of `model.path`, as they were loaded.
        name: of the data, for the file.
        size: how many examples there are.

    Returns:
        float32 [examples, sequences of an example] on the CPU, on every rank; and a sentence where what was kept could
        not be used.
    """

    def compute() -> torch.Tensor:
        shape, max_tokens = ModelShape.from_hf(config.model.path), config.actor.max_tokens_per_micro_batch
        parts = []
        for examples in _chunks(size, rows_of):
            rows = [row for example in examples for row in example]
            sums = logprob_sums_everywhere(model, rows, MASK, shape, max_tokens=max_tokens)
            parts.append(sums.view(len(examples), -1))
        return torch.cat(parts)

    file = Path(config.trainer.default_local_dir, f"reference-logprobs-{name}.safetensors")
    return kept_or_computed(file, lambda: _checksum(config, size, rows_of), compute)


def _checksum(config: RunConfig, size: int, rows_of: RowsOf) -> str:
    """Of the model, what it is computed in, and the tokens, which follow from the data and the longest lengths."""
    digest = hashlib.sha256(model_checksum(config.model.path).encode())
    digest.update(f"{config.model.dtype} {config.model.backend}".encode())
    for examples in _chunks(size, rows_of):
        for row in (row for example in examples for row in example):
            digest.update(row.token_ids.numpy().tobytes() + row.columns[MASK].numpy().tobytes())
    return digest.hexdigest()


def _chunks(size: int, rows_of: RowsOf) -> Iterator[list[tuple[Row, ...]]]:
    for start in range(0, size, _EXAMPLES_AT_ONCE):
        yield rows_of(range(start, min(start + _EXAMPLES_AT_ONCE, size)))
