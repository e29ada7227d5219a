"""What a larger reward model says about pairs: computed once before training, and kept in the run's folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from megarl.config import RunConfig
from megarl.config.model_shape import ModelShape
from megarl.data.chat import ChatTokenizer
from megarl.data.pairs import PairDataset
from megarl.models.build import MegatronModel, Role
from megarl.models.scores import scoring_pad_token_id
from megarl.parallel.groups import Groups
from megarl.trainers.kept import kept_or_computed, model_checksum
from megarl.trainers.scoring import score_everywhere
from megarl.trainers.setup import check_same_tokens, load_model

_PAIRS_AT_ONCE = 1024
"""Pairs whose tokens are in memory at a time."""


def teacher_scores(
    config: RunConfig, groups: Groups, name: str, data: PairDataset, chat: ChatTokenizer
) -> torch.Tensor:
    """The scores that `reward_model.teacher` gives both responses of every pair. Collective over the world.

    The teacher is sharded as the model is, and is in memory in here only. Its scores are read from the run's folder
    where they are of the same data and the same teacher (`_checksum`).

    Args:
        name: of the data, for the file.
        chat: the model's own.

    Returns:
        float32 [pairs, 2] on the CPU, chosen and rejected, on every rank.

    Raises:
        ConfigError: the teacher cannot be loaded, or it reads other tokens than the model.
    """
    folder = Path(str(config.reward_model.teacher))
    check_same_tokens(folder, "reward_model.teacher", chat)

    def compute() -> torch.Tensor:
        return score_pairs(
            load_model(config, groups, role=Role.REWARD, path=folder, needs_head=True),
            data,
            ModelShape.from_hf(folder),
            max_tokens=config.actor.max_tokens_per_micro_batch,
            pad_token_id=scoring_pad_token_id(folder),
        )

    file = Path(config.trainer.default_local_dir, f"teacher-scores-{name}.safetensors")
    scores, _ = kept_or_computed(file, lambda: _checksum(folder, data), compute)
    return scores


def score_pairs(
    model: MegatronModel, data: PairDataset, shape: ModelShape, *, max_tokens: int, pad_token_id: int | None
) -> torch.Tensor:
    """The scores of both responses of every pair, float32 [pairs, 2], on every rank. Collective over the world."""
    parts = []
    for start in range(0, len(data), _PAIRS_AT_ONCE):
        pairs = data.examples(range(start, min(start + _PAIRS_AT_ONCE, len(data))))
        sequences = [torch.tensor(side.token_ids) for pair in pairs for side in (pair.chosen, pair.rejected)]
        scores = score_everywhere(model, sequences, shape, max_tokens=max_tokens, pad_token_id=pad_token_id)
        parts.append(scores.view(-1, 2))
    return torch.cat(parts)


def _checksum(teacher: Path, data: PairDataset) -> str:
    digest = hashlib.sha256(model_checksum(teacher).encode())
    for start in range(0, len(data), _PAIRS_AT_ONCE):
        for pair in data.examples(range(start, min(start + _PAIRS_AT_ONCE, len(data)))):
            digest.update(repr((pair.chosen.token_ids, pair.rejected.token_ids)).encode())
    return digest.hexdigest()
