"""Every rank gets the score of every sequence, also where there are fewer sequences than ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.spawn import run_ranks
from tests.trainers import scoring_ranks
from tests.trainers.tiny_pairs import make_tiny_reward_model

COUNTS = [1, 7]
LAYOUTS = {"one": (1, {}), "DP2": (2, {}), "PP2": (2, {"pp": 2}), "CP2": (2, {"cp": 2})}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_transformers_on_every_rank(tmp_path: Path, layout: str) -> None:
    folder = make_tiny_reward_model(tmp_path / "model", "qwen2")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ranks, sizes = LAYOUTS[layout]
    with torch.no_grad():
        expected = [
            [model(sequence[None]).logits.item() for sequence in scoring_ranks.sequences(count)] for count in COUNTS
        ]
    for found in run_ranks(scoring_ranks.scores, ranks, folder, COUNTS, sizes):
        for scores, wanted in zip(found, expected, strict=True):
            assert scores == pytest.approx(wanted, abs=1e-5)
