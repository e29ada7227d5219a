"""Labelled responses and demonstrations become token ids; what cannot be learned from is named."""

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
from megarl.data.demonstrations import Demonstrations
from megarl.data.labelled import LabelledDataset, SplitPairs, load_labelled, next_different
from megarl.data.win_rates import read_win_rates
from tests.data.chat_models import make_chat_model

QUESTION = {"role": "user", "content": "What is two plus three?"}
ANSWER = {"role": "assistant", "content": "five"}


@pytest.fixture
def chat(tmp_path: Path) -> ChatTokenizer:
    return load_chat_tokenizer(make_chat_model(tmp_path / "model"))


def file_of(tmp_path: Path, rows: list[dict[str, Any]]) -> list[str]:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return [str(file)]


def row(i: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": f"Say {i}", "response": f"five {i}", "label": i % 2 == 0, **changes}


@pytest.mark.parametrize(
    "response", ["five", [ANSWER], [QUESTION, ANSWER]], ids=["text", "messages", "whole conversation"]
)
def test_a_row_is_the_conversation_of_the_chat_template(tmp_path: Path, chat: ChatTokenizer, response: Any) -> None:
    rows = [{"prompt": [QUESTION], "response": response, "label": True}]
    dataset = LabelledDataset(file_of(tmp_path, rows), chat, DataConfig())
    (example,) = dataset.examples([0])
    expected = chat.tokenizer.apply_chat_template([QUESTION, ANSWER], return_dict=True)["input_ids"]
    assert example.conversation.token_ids == expected
    learned = [t for t, learn in zip(expected, example.conversation.loss_mask, strict=True) if learn]
    assert chat.tokenizer.decode(learned) == "five<|im_end|>"
    assert dataset.lengths.tolist() == [len(expected)]


@pytest.mark.parametrize("labels", [[True, False, True], [1, 0, 1]], ids=["booleans", "numbers"])
def test_labels_are_read(tmp_path: Path, chat: ChatTokenizer, labels: list[Any]) -> None:
    dataset = load_labelled(
        file_of(tmp_path, [row(i, label=label) for i, label in enumerate(labels)]), chat, DataConfig()
    )
    assert dataset.labels.tolist() == [True, False, True]
    assert [each.desirable for each in dataset.examples([2, 1])] == [True, False]
    assert "2 good and 1 bad responses" in dataset.description()


def test_longer_rows_are_left_out_with_their_labels(tmp_path: Path, chat: ChatTokenizer) -> None:
    rows = [row(0, response="hello " * 40), row(1), row(2)]
    lengths = {"max_prompt_length": 20, "max_response_length": 20}
    dataset = LabelledDataset(file_of(tmp_path, rows), chat, DataConfig(**lengths))
    assert [(each.row, each.desirable) for each in dataset.examples([0, 1])] == [(1, False), (2, True)]


def test_pairs_are_two_labelled_responses_each(tmp_path: Path, chat: ChatTokenizer) -> None:
    rows = [{"prompt": f"Say {i}", "chosen": f"five {i}", "rejected": "two"} for i in range(3)]
    dataset = load_labelled(file_of(tmp_path, rows), chat, DataConfig())
    assert isinstance(dataset, SplitPairs) and len(dataset) == 6
    assert dataset.labels.tolist() == [True, False] * 3
    examples = dataset.examples([3, 4])
    assert [(each.row, each.desirable) for each in examples] == [(1, False), (2, True)]
    assert "two" in chat.decode(examples[0].conversation.token_ids)
    assert [len(each.conversation.token_ids) for each in dataset.examples(range(6))] == dataset.lengths.tolist()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3], [1, 2, 0]),
        ([1, 1, 2, 2, 3], [2, 2, 4, 4, 0]),
        ([1, 2, 1, 1], [1, 2, 1, 1]),
        ([5, 5, 6, 5], [2, 2, 3, 2]),
    ],
)
def test_the_next_different_place_goes_around_the_end(values: list[int], expected: list[int]) -> None:
    assert next_different(values).tolist() == expected


def test_where_all_values_are_one_there_is_still_a_place() -> None:
    assert set(next_different([4, 4, 4]).tolist()) <= {0, 1, 2}


MISTAKES = {
    "no label": ([row(0, label=None), row(1)], ["row 0", "column 'label' is None, but must be true or false"]),
    "another number": ([row(0, label=2), row(1, label=0)], ["row 0", "column 'label' is 2"]),
    "a label of text": ([row(0, label="good")], ["column 'label' is string, but must be true or false"]),
    "an empty response": ([row(0), row(1, response=" ")], ["row 1", "column 'response' is empty"]),
    "no response": ([row(0, response=None), row(1)], ["row 0", "column 'response' is null"]),
    "no prompt": ([row(0, prompt="")], ["row 0", "column 'prompt' is empty"]),
    "a missing column": ([{"prompt": "a", "label": True}], ["there is no column 'response'"]),
}


@pytest.mark.parametrize(("rows", "wanted"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_file_and_row(
    tmp_path: Path, chat: ChatTokenizer, rows: list[dict[str, Any]], wanted: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_labelled(file_of(tmp_path, rows), chat, DataConfig())
    message = str(caught.value)
    assert "rows.parquet" in message and "\n" not in message
    for part in wanted:
        assert part in message


@pytest.mark.parametrize("prompt", ["What is two plus three?", [QUESTION]], ids=["text", "messages"])
def test_demonstrations_are_prompts_with_a_response(tmp_path: Path, chat: ChatTokenizer, prompt: Any) -> None:
    rows = [{"prompt": prompt, "response": "five"}, {"prompt": prompt, "response": "5"}]
    data = Demonstrations(file_of(tmp_path, rows), chat, DataConfig())
    found = data.prompts([1, 0])
    expected = chat.tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=True)
    assert [each.row for each in found] == [1, 0]
    assert found[0].token_ids == expected["input_ids"] and found[0].messages == [QUESTION]
    assert data.responses([1, 0]) == ["5", "five"]


def test_a_demonstration_without_response_is_named(tmp_path: Path, chat: ChatTokenizer) -> None:
    rows = [{"prompt": "a", "response": "five"}, {"prompt": "a", "response": ""}]
    with pytest.raises(ConfigError, match="row 1: column 'response' is empty"):
        Demonstrations(file_of(tmp_path, rows), chat, DataConfig())


def test_win_rates_are_those_of_the_file_and_certain_elsewhere(tmp_path: Path) -> None:
    rows = [{"chosen_win_rate": 0.75, "rejected_win_rate": 0.25}, {"chosen_win_rate": 1.0, "rejected_win_rate": 0.5}]
    assert read_win_rates(file_of(tmp_path, rows)).tolist() == [[0.75, 0.25], [1.0, 0.5]]
    assert read_win_rates(file_of(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])).tolist() == [[1.0, 0.0]] * 2


@pytest.mark.parametrize("rate", [1.5, -0.1, math.nan])
def test_a_win_rate_that_is_no_probability_is_named(tmp_path: Path, rate: float) -> None:
    with pytest.raises(ConfigError, match=r"rows.parquet, row 0: column 'chosen_win_rate' is .*, but must be from 0"):
        read_win_rates(file_of(tmp_path, [{"chosen_win_rate": rate, "rejected_win_rate": 0.0}]))


def test_a_win_rate_that_is_missing_is_not_taken_for_certain(tmp_path: Path) -> None:
    rows = [{"chosen_win_rate": 0.5, "rejected_win_rate": 0.5}, {"chosen_win_rate": None, "rejected_win_rate": 0.5}]
    with pytest.raises(ConfigError, match=r"row 1: column 'chosen_win_rate' is null"):
        read_win_rates(file_of(tmp_path, rows))
    with pytest.raises(ConfigError, match=r"a column 'chosen_win_rate' but no 'rejected_win_rate'"):
        read_win_rates(file_of(tmp_path, [{"chosen_win_rate": 0.5}]))
