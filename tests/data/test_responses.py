"""Responses of a dataset become samples as an engine would have given them; what cannot be used is named."""

import math
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import ConfigError, RunConfig
from megarl.data import responses as responses_module
from megarl.data.chat import load_chat_tokenizer
from megarl.data.parquet import ParquetRows
from megarl.data.prompts import PromptDataset
from megarl.data.responses import OfflineResponses
from megarl.data.sampler import PromptSampler
from tests.data.chat_models import make_chat_model

END = "<|im_end|>"
VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_chat_tokenizer(make_chat_model(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def end(chat):
    return chat.tokenizer.convert_tokens_to_ids(END)


def row(question="Hi", **columns):
    return {"data_source": "sums", "prompt": [{"role": "user", "content": question}], **columns}


def write(path, rows, row_group_size=4):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return str(path)


def config_for(files, *, n=2, batch=1, limit=8, truncation="filter", shuffle=True):
    config = RunConfig()
    config.data.train_files = files
    config.data.train_batch_size = batch
    config.data.max_response_length = limit
    config.data.truncation = truncation
    config.data.shuffle = shuffle
    config.rollout.engine = "dataset"
    config.rollout.n = n
    return config


@pytest.fixture
def offline(chat, tmp_path):
    """The dataset of rows in one file, with settings."""

    def make(rows, **settings):
        return OfflineResponses(config_for([write(tmp_path / "rows.parquet", rows)], **settings), chat)

    return make


@pytest.fixture
def refusal(chat, tmp_path):
    """The sentence that refuses rows, without the path of the file."""

    def refuse(rows, **settings):
        path = write(tmp_path / "bad.parquet", rows)
        with pytest.raises(ConfigError) as error:
            OfflineResponses(config_for([path], **settings), chat)
        (problem,) = error.value.problems
        assert path in problem and problem.endswith(".") and "\n" not in problem
        return problem.replace(path, "FILE")

    return refuse


def samples_of(dataset, indices, step=1):
    return dataset.samples(list(enumerate(dataset.prompts(indices))), step)


def test_a_text_is_tokenised_as_it_is_and_gets_the_end_token(chat, end, offline):
    texts = [" two plus three", f"five{END}"]
    dataset = offline([row(responses=texts)])
    first, second = samples_of(dataset, [0])
    assert first.response_ids == [*chat.tokenizer(" two plus three", add_special_tokens=False)["input_ids"], end]
    assert second.response_ids == chat.tokenizer(f"five{END}", add_special_tokens=False)["input_ids"]
    assert second.response_ids.count(end) == 1
    assert (first.response_text, second.response_text) == (" two plus three", "five")
    assert {sample.finish_reason for sample in (first, second)} == {"stop"}


def test_token_ids_are_taken_as_they_are_with_their_rewards_and_log_probs(end, offline):
    rows = [
        row(
            f"Question {i}?",
            responses=[[70 + i, 80, end], [90, 100 + i]],
            response_rewards=[0.1 + i, -2.5],
            response_logprobs=[[-0.1, -(0.1 + i), 0.0], [-1e-9, -7.25]],
        )
        for i in range(6)
    ]
    dataset = offline(rows, n=2, batch=6, shuffle=False)
    assert (len(dataset), dataset.has_rewards, dataset.has_logprobs) == (6, True, True)
    samples = samples_of(dataset, range(6))
    assert [(sample.group, sample.index) for sample in samples] == [(i, j) for i in range(6) for j in range(2)]
    for i in range(6):
        ended, cut_off = samples[2 * i : 2 * i + 2]
        assert ended.prompt.messages == rows[i]["prompt"]
        assert (ended.response_ids, cut_off.response_ids) == ([70 + i, 80, end], [90, 100 + i])
        assert (ended.finish_reason, cut_off.finish_reason) == ("stop", "length")
        assert (ended.response_mask, cut_off.response_mask) == ([1, 1, 1], [1, 1])
        assert (ended.rewards, cut_off.rewards) == ({"score": 0.1 + i}, {"score": -2.5})
        assert ended.rollout_logprobs == [-0.1, -(0.1 + i), 0.0]
        assert cut_off.rollout_logprobs == [-1e-9, -7.25]


def test_what_the_data_does_not_say_is_neither_a_reward_of_0_nor_a_probability_of_1(offline):
    dataset = offline([row(responses=["five", "six"])])
    assert (dataset.has_rewards, dataset.has_logprobs) == (False, False)
    for sample in samples_of(dataset, [0]):
        assert sample.rewards == {}
        assert len(sample.rollout_logprobs) == len(sample.response_ids)
        assert all(map(math.isnan, sample.rollout_logprobs))


def test_graders_are_needed_where_the_data_has_no_rewards(offline):
    assert offline([row(responses=["five", "six"])]).sources == {("sums", None)}
    assert offline([row(responses=["five", "six"], response_rewards=[1, 0])]).sources == frozenset()


def test_prompts_are_those_of_the_prompt_dataset(chat, tmp_path):
    questions = ["five " * (1 + i % 5) for i in range(20)]
    path = write(tmp_path / "a.parquet", [row(question, responses=["a", "b"]) for question in questions])
    config = config_for([path])
    config.data.max_prompt_length = int(PromptDataset([path], chat, config.data).lengths[3])
    prompts = PromptDataset([path], chat, config.data)
    dataset = OfflineResponses(config, chat)
    assert 0 < len(dataset) == len(prompts) < 20, "some prompts should be too long"
    assert dataset.prompts(range(len(dataset))) == prompts.prompts(range(len(prompts)))
    assert dataset.lengths.tolist() == prompts.lengths.tolist()
    assert prompts.description() in dataset.description()


def test_over_the_epochs_every_response_of_a_row_gets_its_turn(offline):
    """As the sampler draws them: 10 rows in batches of 4, which cross the ends of epochs."""
    texts = [str(i) for i in range(5)]
    dataset = offline([row(f"Question {i}", responses=texts) for i in range(10)], n=2, batch=4)
    sampler = PromptSampler(len(dataset), 4, shuffle=True, seed=1)
    taken = {number: [] for number in range(10)}
    for step in range(1, 26):  # 10 epochs of 10 rows are 25 steps
        prompts = dataset.prompts(sampler.next_batch())
        for sample in dataset.samples(list(enumerate(prompts)), step):
            taken[sample.prompt.row].append(sample.response_text)
    for number, responses in taken.items():
        assert Counter(responses) == dict.fromkeys(texts, 4), number  # 10 epochs × 2 of 5
        assert all(responses[i] != responses[i + 1] for i in range(0, 20, 2)), "no response twice in a group"
    assert len({tuple(responses) for responses in taken.values()}) > 1, "rows have orders of their own"


def test_which_responses_are_taken_depends_on_neither_the_share_nor_what_was_read_before(chat, tmp_path):
    rows = [row(f"Question {i}", responses=[f"{i} {j}" for j in range(7)]) for i in range(8)]
    config = config_for([write(tmp_path / "a.parquet", rows)], n=3, batch=8)
    dataset = OfflineResponses(config, chat)
    prompts = list(enumerate(dataset.prompts([5, 2, 7, 0, 1, 3, 4, 6])))
    whole = dataset.samples(prompts, 4)
    again = OfflineResponses(config, chat)
    halves = [*again.samples(prompts[1::2], 4), *again.samples(prompts[::2], 4)]
    assert sorted(halves, key=lambda sample: (sample.group, sample.index)) == whole
    assert [s.response_text for s in dataset.samples(prompts, 5)] != [s.response_text for s in whole]


def test_without_shuffling_responses_come_in_the_order_of_the_file(offline):
    dataset = offline([row(responses=list("abcde"))], n=2, shuffle=False)
    taken = [sample.response_text for step in (1, 2, 3) for sample in samples_of(dataset, [0], step)]
    assert taken == ["a", "b", "c", "d", "e", "a"]


LONG = [30] * 9


def test_longer_responses_are_left_out_and_then_the_rows_that_have_too_few(end, offline):
    rows = [
        row(responses=[LONG, [40, end], [50, end]]),
        row(responses=[LONG, LONG, [60, end]]),
        row(responses=[[70]] * 3),
    ]
    dataset = offline(rows, n=2, batch=2)
    assert [prompt.row for prompt in dataset.prompts(range(len(dataset)))] == [0, 2]
    assert sorted(sample.response_ids for sample in samples_of(dataset, [0, 1])) == [[40, end], [50, end], [70], [70]]
    description = dataset.description()
    for words in (
        "6 of their 9 responses are used",
        "3 left out, longer than data.max_response_length = 8 tokens",
        "1 rows left out, which then have fewer than rollout.n = 2",
        "up to 2 tokens, mean 1.5",
        "without rewards ('response_rewards')",
    ):
        assert words in description


def test_longer_responses_are_cut_where_generation_would_have_stopped(end, offline):
    logprobs = [[-0.5] * 8 + [-9.0, -9.0], [-0.25]]
    rows = [row(responses=[[30] * 9 + [end], [end]], response_logprobs=logprobs)]
    dataset = offline(rows, truncation="truncate_left", shuffle=False)
    cut, whole = samples_of(dataset, [0])
    assert (cut.response_ids, cut.finish_reason, cut.rollout_logprobs) == ([30] * 8, "length", [-0.5] * 8)
    assert (whole.response_ids, whole.finish_reason) == ([end], "stop")
    assert "1 cut at their end to data.max_response_length = 8 tokens" in dataset.description()


def test_a_reward_of_a_whole_response_is_not_given_to_a_part_of_it(refusal):
    rows = [row(responses=[[30], [40]], response_rewards=[0, 0]), row(responses=[[30], LONG], response_rewards=[0, 1])]
    problem = refusal(rows, truncation="truncate_left")
    assert problem.startswith("FILE, row 1: column 'response_rewards' rewards a whole response (number 1)")


def test_a_longer_response_can_be_an_error_that_names_its_row(refusal):
    problem = refusal([row(responses=[[30], [40]]), row(responses=[[30], LONG])], truncation="error")
    assert problem.startswith("FILE, row 1: ") and "9 tokens (number 1)" in problem


def test_nothing_left_is_an_error_with_the_shortest_length(refusal):
    problem = refusal([row(responses=[LONG, [*LONG, 31]])])
    for words in ("rollout.n = 2", "data.max_response_length = 8", "the shortest response has 9"):
        assert words in problem


BAD_ROWS = {
    "null": ({"responses": None}, "column 'responses' is null"),
    "none": ({"responses": []}, "column 'responses' has no responses"),
    "fewer than a group": ({"responses": [[30]]}, "column 'responses' has 1 responses, but rollout.n is 2"),
    "an empty response": ({"responses": [[30], []]}, "null or empty (number 1)"),
    "a null response": ({"responses": [None, [30]]}, "null or empty (number 0)"),
    "a token that is not there": ({"responses": [[30], [40, VOCAB_SIZE]]}, "vocabulary of 400 (response 1)"),
    "a negative token": ({"responses": [[-1], [30]]}, "vocabulary of 400 (response 0)"),
    "a null token": ({"responses": [[30], [40, None]]}, "vocabulary of 400 (response 1)"),
    "too few rewards": ({"response_rewards": [1.0]}, "column 'response_rewards' has 1 entries for 2 responses"),
    "a NaN reward": ({"response_rewards": [1.0, math.nan]}, "'response_rewards' is nan for response 1"),
    "a null reward": ({"response_rewards": [None, 1.0]}, "'response_rewards' is None for response 0"),
    "no rewards, as only here": ({"response_rewards": None}, "'response_rewards' is missing or null, but row 0 of"),
    "too few lists": ({"response_logprobs": [[-1.0]]}, "column 'response_logprobs' has 1 entries for 2 responses"),
    "too few log-probs": ({"response_logprobs": [[-1.0], []]}, "has 0 numbers for the 1 tokens of response 1"),
    "null log-probs": ({"response_logprobs": [None, [-1.0]]}, "has 0 numbers for the 1 tokens of response 0"),
    "a NaN log-prob": ({"response_logprobs": [[-1.0], [math.nan]]}, "is nan for token 0 of response 1"),
    "a log-prob of -inf": ({"response_logprobs": [[-math.inf], [-1.0]]}, "is -inf for token 0 of response 0"),
    "probabilities": ({"response_logprobs": [[0.9], [0.1]]}, "is 0.9 for token 0 of response 0; a log-prob is"),
}


@pytest.mark.parametrize(("bad", "words"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_with_file_row_and_column(bad, words, refusal):
    good = {"responses": [[30], [40]], "response_rewards": [1.0, 0.0], "response_logprobs": [[-1.0], [-1.0]]}
    problem = refusal([*(row(**good) for _ in range(5)), row(**{**good, **bad})])
    assert problem.startswith("FILE, row 5: ") and words in problem


def test_what_follows_an_end_token_is_refused(end, refusal):
    assert "row 0: column 'responses' has an end token within a response (number 1)" in refusal(
        [row(responses=[[30, end], [30, end, 40, end]])]
    )
    assert "has an end token within a response (number 0)" in refusal([row(responses=[f"five{END}\n", "six"])])


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_text_of_nothing_is_refused(text, refusal):
    assert "row 0: column 'responses' has a response that is null or empty (number 1)" in refusal(
        [row(responses=["five", text])]
    )


def test_log_probs_of_texts_are_refused(refusal):
    problem = refusal([row(responses=["a", "b"], response_logprobs=[[-1.0], [-1.0]])])
    assert "row 0: column 'response_logprobs' has log-probs of tokens, but the responses are texts" in problem


BAD_COLUMNS = {
    "none": ({}, "there is no column 'responses' (a list of responses: texts, or lists of token ids)"),
    "one text": ({"responses": "five"}, "column 'responses' is string"),
    "one response of tokens": ({"responses": [30, 40]}, "column 'responses' is list<element: int64>"),
    "text rewards": ({"responses": ["a", "b"], "response_rewards": ["1", "0"]}, "column 'response_rewards' is list"),
    "flat log-probs": ({"responses": [[30], [40]], "response_logprobs": [-1.0, -2.0]}, "'response_logprobs' is list"),
}


@pytest.mark.parametrize(("columns", "words"), BAD_COLUMNS.values(), ids=BAD_COLUMNS.keys())
def test_a_bad_column_is_named_before_any_row_is_read(columns, words, refusal):
    problem = refusal([row(**columns)])
    assert problem.startswith("FILE: ") and words in problem


def test_files_of_which_only_some_have_rewards_are_refused(chat, tmp_path):
    without, with_rewards = row(responses=["a", "b"]), row(responses=["a", "b"], response_rewards=[0.0, 1.0])
    for first, second, words in (
        (without, with_rewards, "is there, but row 0 of"),
        (with_rewards, without, "is missing or null, but row 0 of"),
    ):
        files = [write(tmp_path / "a.parquet", [first]), write(tmp_path / "b.parquet", [second])]
        with pytest.raises(ConfigError) as error:
            OfflineResponses(config_for(files), chat)
        assert str(error.value).startswith(f"{files[1]}, row 0: column 'response_rewards' {words} {files[0]}")


def test_importance_correction_without_log_probs_is_refused(chat, tmp_path):
    path = write(tmp_path / "a.parquet", [row(responses=["a", "b"])])
    for key, value in (("rollout_is", "token"), ("rollout_rs", "token_k1")):
        config = config_for([path])
        setattr(config.algorithm.rollout_correction, key, value)
        with pytest.raises(ConfigError) as error:
            OfflineResponses(config, chat)
        for words in ("algorithm.rollout_correction", path, "'response_logprobs'", "data.logprobs_key"):
            assert words in str(error.value)


def test_settings_that_rewards_of_the_data_would_not_follow_are_refused(chat, tmp_path):
    path = write(tmp_path / "a.parquet", [row(responses=["a", "b"], response_rewards=[0, 1])])
    config = config_for([path])
    config.algorithm.adv_estimator = "gdpo"
    config.reward.overlong_buffer.enable = True
    with pytest.raises(ConfigError) as error:
        OfflineResponses(config, chat)
    several, overlong = error.value.problems
    assert "gdpo needs several rewards by name" in several and path in several
    assert overlong.startswith("reward.overlong_buffer.enable") and path in overlong


def test_columns_may_have_other_names(chat, end, tmp_path):
    rows = [row(answers=[[30, end], [40]], scores=[1, 0], lp=[[-1.0, -2.0], [-3.0]])]
    config = config_for([write(tmp_path / "a.parquet", rows)], shuffle=False)
    config.data.responses_key, config.data.rewards_key, config.data.logprobs_key = "answers", "scores", "lp"
    first, second = samples_of(OfflineResponses(config, chat), [0])
    assert (first.response_ids, first.rewards, first.rollout_logprobs) == ([30, end], {"score": 1.0}, [-1.0, -2.0])
    assert second.rollout_logprobs == [-3.0]


def test_a_step_decodes_only_the_row_groups_of_its_rows(chat, tmp_path, monkeypatch):
    rows = [row(f"Question {i}", responses=[f"{i} a", f"{i} b"]) for i in range(40)]
    monkeypatch.setitem(ParquetRows.__init__.__kwdefaults__, "cache_bytes", 0)
    dataset = OfflineResponses(config_for([write(tmp_path / "a.parquet", rows)], batch=3), chat)
    prompts = list(enumerate(dataset.prompts([30, 1, 2])))
    decoded = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, number, **rest: decoded.append(number) or read(self, number, **rest),
    )
    samples = dataset.samples(prompts, 1)
    assert decoded == [0, 7], "of 10 row groups of 4 rows"
    assert [sample.response_text.split()[0] for sample in samples] == ["30", "30", "1", "1", "2", "2"]


def test_a_long_count_says_how_far_it_is(chat, tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", [row(responses=["a", "b"]) for _ in range(30)])
    monkeypatch.setattr(responses_module, "_PROGRESS_ROWS", 10)
    said = []
    OfflineResponses(config_for([path]), chat, progress=said.append)
    assert said == [f"counted the tokens of the responses of {done} of 30 rows" for done in (10, 20, 30)]
