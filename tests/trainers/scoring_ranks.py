"""Scores of a reward model over the ranks of a world."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from megarl import platform

platform.current()  # prepares Megatron-Core before anything imports it
logging.disable(logging.WARNING)

from megarl.config import ModelShape  # noqa: E402
from megarl.config.layout import Layout  # noqa: E402
from megarl.models.bridge import read_hf_config  # noqa: E402
from megarl.models.build import Role, build_model  # noqa: E402
from megarl.parallel.groups import build_groups  # noqa: E402
from megarl.trainers.scoring import score_everywhere  # noqa: E402
from megarl.weights.load_hf import load_hf  # noqa: E402

MAX_TOKENS = 32


def sequences(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(1, 200, (3 + 5 * i % 26,), generator=generator) for i in range(count)]


def scores(folder: Path, counts: list[int], layout: dict) -> list[list[float]]:
    """Of several numbers of sequences."""
    groups = build_groups(Layout(world_size=dist.get_world_size(), **layout))
    model = build_model(read_hf_config(folder), groups, role=Role.REWARD, dtype=torch.float32)
    load_hf(model, folder)
    shape = ModelShape.from_hf(folder)
    return [
        score_everywhere(model, sequences(count), shape, max_tokens=MAX_TOKENS, pad_token_id=None).tolist()
        for count in counts
    ]
