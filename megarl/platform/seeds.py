"""Random numbers: one seed names the whole run."""

from __future__ import annotations

import random

import numpy
import torch

from megarl.platform.device import current


def seed_everything(seed: int, *, data_parallel_rank: int = 0) -> None:
    """Seeds Python, numpy, torch and Megatron-Core's tracker of tensor-parallel generators.

    Ranks of one tensor-parallel group get equal seeds for what they hold alike and different ones for what they
    shard; Megatron-Core's tracker does that, so this must run after the process groups are made.
    Dropout must differ between data-parallel ranks, initial weights must not: weights are loaded or broadcast.

    Args:
        seed: the run's seed, ≥ 0.
        data_parallel_rank: mixed into the seed of Python and numpy, whose draws are per-rank.
    """
    current()
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(seed + data_parallel_rank)
    numpy.random.seed((seed + data_parallel_rank) % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
