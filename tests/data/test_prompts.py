"""Prompt files become prompts of a bounded length; what cannot be used is named by file, column and row."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import ConfigError
from megarl.config.schema_inputs import DataConfig
from megarl.data import lengths
from megarl.data.chat import load_chat_tokenizer
from megarl.data.prompts import PromptDataset
from tests.data.chat_models import make_chat_model


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_chat_tokenizer(make_chat_model(tmp_path_factory.mktemp("model")))


def row(question, number=0, **changes):
    return {
        "data_source": "sums",
        "prompt": None if question is None else [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number},
        **changes,
    }


def write(path, rows, row_group_size=4):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return str(path)


QUESTIONS = ["five " * number for number in range(1, 31)]


@pytest.fixture
def files(tmp_path):
    rows = [row(question, number) for number, question in enumerate(QUESTIONS)]
    return [write(tmp_path / "a.parquet", rows[:12]), write(tmp_path / "b.parquet", rows[12:])]


def expected_ids(chat, question):
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_prompt_has_all_that_its_row_has(chat, files):
    dataset = PromptDataset(files, chat, DataConfig())
    assert len(dataset) == 30
    for number, prompt in enumerate(dataset.prompts(range(30))):
        assert prompt.row == number
        assert prompt.token_ids == expected_ids(chat, QUESTIONS[number])
        assert prompt.messages == [{"role": "user", "content": QUESTIONS[number]}]
        assert prompt.data_source == "sums"
        assert prompt.reward_model == {"style": "rule", "ground_truth": str(number)}
        assert prompt.extra_info == {"index": number}
        assert dataset.lengths[number] == len(prompt.token_ids)
    assert dataset[17] == dataset.prompts([17])[0]
    assert dataset.prompts([]) == []


def test_long_prompts_are_left_out_and_counted(chat, files):
    limit = len(expected_ids(chat, QUESTIONS[19]))
    dataset = PromptDataset(files, chat, DataConfig(max_prompt_length=limit))
    short = [n for n, question in enumerate(QUESTIONS) if len(expected_ids(chat, question)) <= limit]
    assert [prompt.row for prompt in dataset.prompts(range(len(dataset)))] == short
    assert max(dataset.lengths) == limit
    description = dataset.description()
    assert f"{len(short)} of 30 rows are used" in description
    assert f"{30 - len(short)} left out, longer than data.max_prompt_length = {limit} tokens" in description


def test_long_prompts_are_cut_at_their_beginning_and_counted(chat, files):
    dataset = PromptDataset(files, chat, DataConfig(max_prompt_length=20, truncation="truncate_left"))
    assert len(dataset) == 30
    for prompt, question in zip(dataset.prompts(range(30)), QUESTIONS, strict=True):
        assert prompt.token_ids == expected_ids(chat, question)[-20:]
    cut = sum(len(expected_ids(chat, question)) > 20 for question in QUESTIONS)
    assert f"{cut} cut at their beginning to data.max_prompt_length = 20 tokens" in dataset.description()
    assert max(dataset.lengths) == 20


def test_a_long_prompt_can_be_an_error_that_names_its_row(chat, files):
    first = next(n for n, question in enumerate(QUESTIONS) if len(expected_ids(chat, question)) > 40)
    assert first > 12, "the row should be in the second file"
    with pytest.raises(ConfigError) as error:
        PromptDataset(files, chat, DataConfig(max_prompt_length=40, truncation="error"))
    for word in (f"{files[1]}, row {first - 12} ", "data.max_prompt_length = 40", "filter or truncate_left"):
        assert word in str(error.value)


def test_nothing_left_is_an_error_with_the_shortest_length(chat, files):
    shortest = len(expected_ids(chat, QUESTIONS[0]))
    with pytest.raises(ConfigError) as error:
        PromptDataset(files, chat, DataConfig(max_prompt_length=3))
    for word in (files[0], "all 30 rows", "data.max_prompt_length = 3", f"the shortest has {shortest}"):
        assert word in str(error.value)


def test_rows_for_a_reward_function_of_ones_own_need_neither_ground_truth_nor_extra_info(chat, tmp_path):
    bare = [{"data_source": "mine", "prompt": [{"role": "user", "content": "Hi"}]}]
    prompt = PromptDataset([write(tmp_path / "bare.parquet", bare)], chat, DataConfig())[0]
    assert (prompt.reward_model, prompt.extra_info) == ({}, {})
    null = [row("Hi", reward_model=None, extra_info=None)]
    prompt = PromptDataset([write(tmp_path / "null.parquet", null)], chat, DataConfig())[0]
    assert (prompt.reward_model, prompt.extra_info) == ({}, {})


def test_the_sources_of_all_rows_are_known_before_any_is_drawn(chat, tmp_path):
    rows = [row("Hi"), row("Hi", data_source="mine", reward_model=None), row("Hi")]
    dataset = PromptDataset([write(tmp_path / "a.parquet", rows)], chat, DataConfig())
    assert dataset.sources == {("sums", "rule"), ("mine", None)}


def test_the_prompt_may_be_in_another_column(chat, tmp_path):
    rows = [{"data_source": "mine", "chat": [{"role": "user", "content": "Hi"}]}]
    dataset = PromptDataset([write(tmp_path / "a.parquet", rows)], chat, DataConfig(prompt_key="chat"))
    assert dataset[0].token_ids == expected_ids(chat, "Hi")


BAD_ROWS = {
    "a null prompt": (row(None), "column 'prompt' is null"),
    "no messages": (row("", prompt=[]), "column 'prompt' has no messages"),
    "an empty message": (row("  "), "column 'prompt' has no text"),
    "a message without content": (row("", prompt=[{"role": "user", "content": None}]), "without content"),
    "no data source": (row("Hi", data_source=None), "column 'data_source' is null or empty"),
}


@pytest.mark.parametrize(("bad", "words"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_with_file_and_column(bad, words, chat, files, tmp_path):
    path = write(tmp_path / "bad.parquet", [*(row("Hi") for _ in range(9)), bad])
    with pytest.raises(ConfigError) as error:
        PromptDataset([*files, path], chat, DataConfig())
    assert f"{path}, row 9: " in str(error.value) and words in str(error.value)
    assert str(error.value).endswith(".")


def test_a_bad_column_is_named_before_any_row_is_read(chat, tmp_path):
    cases = {
        "prompt": (row("", prompt="Hi"), ["column 'prompt' is string", "chat messages"]),
        "data_source": (row("Hi", data_source=3), ["column 'data_source' is int64", "must be text"]),
        "reward_model": (row("Hi", reward_model="rule"), ["column 'reward_model' is string"]),
        "missing": ({"question": "Hi", "data_source": "x"}, ["no column 'prompt'", "question, data_source"]),
    }
    for name, (bad, words) in cases.items():
        path = write(tmp_path / f"{name}.parquet", [bad])
        with pytest.raises(ConfigError) as error:
            PromptDataset([path], chat, DataConfig())
        for word in [path, *words]:
            assert word in str(error.value)


def test_a_long_count_says_how_far_it_is(chat, files, monkeypatch):
    monkeypatch.setattr(lengths, "_PROGRESS_ROWS", 10)
    said = []
    PromptDataset(files, chat, DataConfig(), progress=said.append)
    assert said == ["counted the tokens of 12 of 30 rows", "counted the tokens of 30 of 30 rows"]
