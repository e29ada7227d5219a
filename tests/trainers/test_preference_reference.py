"""The reference's log-probs are computed once; data without a lesson is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spawn import run_ranks
from tests.trainers import preference_ranks
from tests.trainers.tiny_pairs import make_tiny_pairs


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_tiny_pairs(tmp_path, trainer={"kind": "preference"})


def test_the_reference_is_computed_only_where_its_logprobs_are_not_kept(config: Path) -> None:
    for found in run_ranks(preference_ranks.when_the_reference_is_asked, 2, config):
        computed = {situation: was for situation, (was, _) in found.items()}
        assert computed == {
            "at first": True,
            "again": False,
            "after the file was damaged": True,
            "after the weights were written anew": True,
            "with other lengths": True,
            "at last, with the first lengths": True,
        }
        assert found["at first"][1] == found["again"][1] == []
        (note,) = found["after the file was damaged"][1]
        assert note.startswith("reference-logprobs-train.safetensors cannot be read")
        assert note.endswith("so its numbers were computed again")
        for note in found["after the weights were written anew"][1]:
            assert "is of another model or other data" in note


def test_data_without_a_lesson_is_refused_in_one_sentence(config: Path, tmp_path: Path) -> None:
    (messages,) = run_ranks(preference_ranks.refusals, 1, config, tmp_path)
    for message in messages.values():
        assert "\n" not in message
    assert "'label' is true in all 20 usable rows, but kto learns from good and bad" in messages["one label"]
    assert "no pair is left; in 20 of 20 rows 'chosen' and 'rejected' are the same" in messages["equal pairs"]
    assert "there is no column 'chosen'" in messages["labels for dpo"]
    assert "preference.loss_type is 'hinge', but the preference losses are dpo" in messages["a loss that nobody has"]
    assert "round-1 holds a round of another run" in messages["a round of another run"]
    assert (
        "preference.prompts_per_round is 21, but data.train_files have only 20"
        in messages["more prompts than there are"]
    )
