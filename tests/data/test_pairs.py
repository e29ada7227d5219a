"""Preference rows become two conversations each; what cannot be learned from is left out or named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import ConfigError
from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import ChatTokenizer, load_chat_tokenizer
from megarl.data.pairs import PairDataset
from tests.data.chat_models import make_chat_model

QUESTION = {"role": "user", "content": "What is two plus three?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("five", "two"))
FORMS = {
    "texts": {"prompt": QUESTION["content"], "chosen": "five", "rejected": "two"},
    "prompt of messages": {"prompt": [QUESTION], "chosen": "five", "rejected": "two"},
    "answers of messages": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "whole conversations": {"prompt": QUESTION["content"], "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
}


def dataset_of(tmp_path: Path, *rows: dict[str, Any], **settings: Any) -> tuple[PairDataset, ChatTokenizer]:
    chat = load_chat_tokenizer(make_chat_model(tmp_path / "model"))
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return PairDataset([str(file)], chat, DataConfig(**settings)), chat


def row(i: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": f"Say {i}", "chosen": f"five {i}", "rejected": "two", **changes}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_conversations_of_the_chat_template(tmp_path: Path, form: str) -> None:
    dataset, chat = dataset_of(tmp_path, FORMS[form])
    pair = dataset[0]
    for conversation, answer in ((pair.chosen, GOOD), (pair.rejected, BAD)):
        expected = chat.tokenizer.apply_chat_template([QUESTION, answer], return_dict=True)["input_ids"]
        assert conversation.token_ids == expected
        learned = [token for token, learn in zip(expected, conversation.loss_mask, strict=True) if learn]
        assert chat.tokenizer.decode(learned) == f"{answer['content']}<|im_end|>"
    assert dataset.lengths.tolist() == [[len(pair.chosen.token_ids), len(pair.rejected.token_ids)]]
    assert pair.margin == 0


def test_margins_are_read_where_there_are_any(tmp_path: Path) -> None:
    dataset, _ = dataset_of(tmp_path, row(0, margin=0.5), row(1, margin=None), row(2, margin=2.0))
    assert [pair.margin for pair in dataset.examples([2, 0, 1])] == [2.0, 0.5, 0.0]


def test_rows_with_two_equal_responses_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = [row(0), row(1, chosen="two"), row(2), row(3, rejected="five 3")]
    dataset, _ = dataset_of(tmp_path, *rows)
    assert [pair.row for pair in dataset.examples([0, 1])] == [0, 2]
    assert len(dataset) == 2 and dataset.num_same == 2
    assert "2 of 2 rows are used" in dataset.description()
    assert "2 more left out, whose two responses are the same" in dataset.description()


def test_a_pair_is_as_long_as_its_longer_conversation(tmp_path: Path) -> None:
    rows = [row(0), row(1, rejected="hello " * 40), row(2, chosen="hello " * 40)]
    dataset, _ = dataset_of(tmp_path, *rows, max_prompt_length=20, max_response_length=20)
    assert [pair.row for pair in dataset.examples(range(len(dataset)))] == [0]
    assert "2 left out, longer than data.max_prompt_length + data.max_response_length = 40" in dataset.description()


def test_longer_conversations_are_cut_at_their_beginning_if_asked_for(tmp_path: Path) -> None:
    rows = [row(0, rejected="hello " * 40)]
    lengths = {"max_prompt_length": 20, "max_response_length": 20}
    dataset, _ = dataset_of(tmp_path, *rows, **lengths, truncation="truncate_left")
    whole, _ = dataset_of(tmp_path, *rows)
    assert dataset[0].rejected.token_ids == whole[0].rejected.token_ids[-40:]
    assert dataset[0].chosen == whole[0].chosen
    assert dataset.lengths.tolist() == [[len(whole[0].chosen.token_ids), 40]]


def test_rows_that_do_not_fit_in_memory_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(i, margin=float(i)) for i in range(5)]
    kept, _ = dataset_of(tmp_path, *rows)
    monkeypatch.setattr("megarl.data.encoded.EncodedRows.add", lambda *_: None)
    not_kept, _ = dataset_of(tmp_path, *rows)
    assert kept.examples([4, 1, 1, 0]) == not_kept.examples([4, 1, 1, 0])


MISTAKES = {
    "no chosen": ([row(0), row(1, chosen=None)], ["row 1", "column 'chosen' is null"]),
    "an empty rejected": ([row(0, rejected="  ")], ["row 0", "column 'rejected' is empty"]),
    "no prompt": ([row(0, prompt="")], ["row 0", "column 'prompt' is empty"]),
    "another conversation": (
        [row(0, chosen=[{"role": "user", "content": "Say hello"}, GOOD], rejected=[BAD])],
        ["row 0", "column 'chosen' neither begins with the prompt's messages"],
    ),
    "a margin that is no number": ([row(0, margin=math.nan)], ["row 0", "column 'margin' is nan"]),
    "a margin of text": ([row(0, margin="large")], ["column 'margin' is string, but must be a number"]),
    "a missing column": ([{"prompt": "a", "chosen": "b"}], ["there is no column 'rejected'"]),
    "only equal pairs": ([row(0, chosen="two")], ["no pair is left", "in 1 of 1 rows 'chosen' and 'rejected'"]),
}


@pytest.mark.parametrize(("rows", "wanted"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_file_and_row(tmp_path: Path, rows: list[dict], wanted: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        dataset_of(tmp_path, *rows)
    message = str(caught.value)
    assert "rows.parquet" in message and "\n" not in message
    for part in wanted:
        assert part in message
