"""The pairs of a round: the policy answers prompts, and its answers are paired."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from megarl.algorithms.preference import preference_loss, win_rates
from megarl.config import ConfigError, RunConfig
from megarl.data.chat import ChatTokenizer, load_chat_tokenizer
from megarl.data.demonstrations import Demonstrations
from megarl.data.prompts import PromptDataset
from megarl.data.sample import Sample
from megarl.data.sampler import PromptSampler
from megarl.data.win_rates import WIN_RATE_KEYS
from megarl.models.build import MegatronModel
from megarl.parallel.groups import Groups
from megarl.rewards.outcome import SCORE
from megarl.trainers.generation import Generator, Sampling, share_of
from megarl.trainers.generation_setup import build_generator, build_graders, training_sampling
from megarl.trainers.setup import load_model
from megarl.trainers.sync import sync_weights
from megarl.weights.export_hf import plan_export

PAIRS_NAME = "pairs.parquet"

_PROMPTS_AT_ONCE = 256
"""Prompts whose responses are in memory at a time."""

_DRAWS_PER_ROUND = 2**20
"""More than the batches of prompts of any round: their seeds are then all different."""

_EMPTY, _SAME_SCORE, _SAME_TEXT = (
    "have an answer without text",
    "have answers of one score only",
    "have two equal answers",
)
"""Why prompts give no pair, in words that follow their number."""


@dataclass(kw_only=True, slots=True)
class _Outcome:
    """What came of a round's prompts, on rank 0."""

    pairs: list[dict[str, Any]]
    left_out: Counter[str]
    prompts: int = 0
    score: float = 0.0
    """Summed over responses."""
    responses: int = 0

    def notes(self, number: int, scored: bool) -> list[str]:
        """For people."""
        mean = f", mean score {self.score / self.responses:.4f}" if scored else ""
        left_out = "".join(f"; {count:,} {why}" for why, count in self.left_out.items())
        return [
            f"round {number}: {len(self.pairs):,} pairs of {self.prompts:,} prompts and {self.responses:,} responses"
            f"{mean}{left_out}"
        ]


def generate_pairs(config: RunConfig, groups: Groups, number: int, folder: Path) -> list[str]:
    """Writes `PAIRS_NAME` into a round's folder. Collective over the world.

    Columns: prompt (messages), chosen, rejected, and, where answers are scored, the scores and win rates of both.

    Args:
        config: of the round: `model.path` is the policy that generates.
        number: of the round, from 1.

    Returns:
        Sentences about it, for people.

    Raises:
        ConfigError: data, graders or reward model cannot be used, or no pair is left.
    """
    chat = load_chat_tokenizer(config.model.path)
    imitates = preference_loss.traits(config.preference.loss_type).imitates
    data = (Demonstrations if imitates else PromptDataset)(config.data.train_files, chat, config.data)
    graders = None if imitates else build_graders(config, data.sources)
    outcome = _Outcome(pairs=[], left_out=Counter())
    generator = build_generator(config, groups, chat, graders, generates=True)
    return []


def pairs_are_readable(file: Path) -> bool:
    """Whether the pairs of a round are there and whole."""
    try:
        pq.read_metadata(file)
    except (OSError, pa.ArrowInvalid):
        return False
    return True
