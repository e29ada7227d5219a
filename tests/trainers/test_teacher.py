"""A teacher scores the pairs once; its scores are kept for as long as they are those of the data and the teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spawn import run_ranks
from tests.trainers import teacher_ranks
from tests.trainers.tiny_pairs import make_tiny_pairs, make_tiny_reward_model


@pytest.fixture
def config(tmp_path: Path) -> Path:
    teacher = make_tiny_reward_model(tmp_path / "teacher", "llama")
    return make_tiny_pairs(tmp_path, reward_model={"teacher": str(teacher)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_teacher_is_loaded_only_where_its_scores_are_not_kept(config: Path, ranks: int) -> None:
    for found in run_ranks(teacher_ranks.when_the_teacher_is_asked, ranks, config):
        assert found == {
            "at first": True,
            "again": False,
            "after its weights were written anew": True,
            "with other data": True,
            "after the file was damaged": True,
            "at last": False,
        }


def test_a_teacher_that_reads_other_tokens_is_refused(config: Path) -> None:
    (messages,) = run_ranks(teacher_ranks.refusals, 1, config)
    assert "has another chat template than model.path" in messages["another chat template"]
    assert "has another vocabulary than model.path" in messages["another vocabulary"]
