"""SFT rows are tokenised as whole conversations, and learned exactly where the assistant speaks."""

import itertools

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import ConfigError
from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import load_chat_tokenizer
from megarl.data.sft import SftDataset
from tests.data.chat_models import CHATML, CHATML_MARKED, INST, INST_WITHOUT_BOS, make_chat_model

ANSWERS = ["five", " naïve\n\n😀", "I am well, thank you."]
CONVERSATION = [
    {"role": "system", "content": "Be brief, assistant."},
    {"role": "user", "content": "What is two plus three?"},
    {"role": "assistant", "content": ANSWERS[0]},
    {"role": "user", "content": "Say five"},
    {"role": "assistant", "content": ANSWERS[1]},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": ANSWERS[2]},
]
WITHOUT_SYSTEM = CONVERSATION[1:]

# A template that shows reasoning only in the last answer, as Qwen3 does.
REWRITING = CHATML.replace(
    "message['content'] +", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) +"
)
# Only the last answer is closed: the first end token after another one is that of the next question.
UNCLOSED = CHATML.replace(
    "+ '<|im_end|>\\n'", "+ ('<|im_end|>\\n' if loop.last or message['role'] == 'user' else '\\n')"
)

MODELS = {
    "chatml": ({}, CONVERSATION, "<|im_end|>"),
    "chatml with marks that leave out the end token": ({"template": CHATML_MARKED}, CONVERSATION, "<|im_end|>"),
    "turns with bos": ({"template": INST, "bos": "<s>", "eos": "</s>"}, WITHOUT_SYSTEM, " </s>"),
    "bos from the tokenizer": (
        {"template": INST_WITHOUT_BOS, "bos": "<s>", "eos": "</s>", "adds_bos": True},
        WITHOUT_SYSTEM,
        " </s>",
    ),
}


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def dataset_of(tmp_path, rows, *, model=None, **settings):
    chat = load_chat_tokenizer(make_chat_model(tmp_path / "model", **(model or {})))
    return SftDataset([write(tmp_path / "rows.parquet", rows)], chat, DataConfig(**settings)), chat


def learned_texts(example, chat):
    """The text of each run of learned tokens."""
    pairs = zip(example.token_ids, example.loss_mask, strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [chat.tokenizer.decode([token for token, _ in run]) for is_learned, run in runs if is_learned]


@pytest.mark.parametrize(("model", "messages", "end"), MODELS.values(), ids=MODELS.keys())
def test_every_answer_is_learned_with_its_end_token_and_nothing_else(model, messages, end, tmp_path):
    dataset, chat = dataset_of(tmp_path, [{"messages": messages}], model=model)
    example = dataset[0]
    space = " " if end == " </s>" else ""
    assert learned_texts(example, chat) == [f"{space}{answer}{end}" for answer in ANSWERS]


@pytest.mark.parametrize(("model", "messages", "end"), MODELS.values(), ids=MODELS.keys())
def test_tokens_are_those_of_the_whole_conversation_with_one_bos(model, messages, end, tmp_path):
    dataset, chat = dataset_of(tmp_path, [{"messages": messages}], model=model)
    whole = chat.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    bos = [chat.tokenizer.bos_token_id] if model.get("adds_bos") else []
    assert dataset[0].token_ids == bos + whole
    assert dataset.lengths.tolist() == [len(bos + whole)]


def test_a_bos_that_the_template_writes_twice_is_dropped_with_its_place_in_the_mask(tmp_path):
    template = INST.replace("{{ bos_token", "{{ (bos_token if loop.first else '') + bos_token")
    model = {"template": template, "bos": "<s>", "eos": "</s>"}
    dataset, chat = dataset_of(tmp_path, [{"messages": WITHOUT_SYSTEM}], model=model)
    whole = chat.tokenizer.apply_chat_template(WITHOUT_SYSTEM, tokenize=True, return_dict=True)["input_ids"]
    assert dataset[0].token_ids == whole[1:]
    assert len(dataset[0].loss_mask) == len(whole) - 1
    assert learned_texts(dataset[0], chat) == [f" {answer} </s>" for answer in ANSWERS]


def test_a_token_that_joins_the_prompt_and_the_answer_is_kept_whole(tmp_path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\n\nwell"}]
    dataset, chat = dataset_of(tmp_path, [{"messages": messages}])
    whole = chat.render(messages, generation_prompt=False)
    head = chat.render(messages[:1], generation_prompt=True)
    tokens, pieces = chat.encode([whole])[0], chat.encode([head, whole[len(head) :]])
    assert tokens != pieces[0] + pieces[1], "this tokenizer should join the line breaks of prompt and answer"
    assert dataset[0].token_ids == tokens
    # The first token of the two has the prompt's line break and one of the answer's.
    assert learned_texts(dataset[0], chat) == ["\n\n\nwell<|im_end|>"]


@pytest.mark.parametrize("prompt", ["Say five", CONVERSATION[:-1]], ids=["text", "messages"])
def test_of_a_prompt_and_its_response_the_response_alone_is_learned(prompt, tmp_path):
    dataset, chat = dataset_of(tmp_path, [{"prompt": prompt, "response": "I am well."}])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    whole = [*messages, {"role": "assistant", "content": "I am well."}]
    assert dataset[0].token_ids == chat.tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"]
    assert learned_texts(dataset[0], chat) == ["I am well.<|im_end|>"]


def test_columns_may_have_other_names(tmp_path):
    rows = [{"question": "Say five", "answer": "five"}]
    dataset, chat = dataset_of(tmp_path, rows, prompt_key="question", response_key="answer")
    assert learned_texts(dataset[0], chat) == ["five<|im_end|>"]


ROWS = [{"prompt": "five " * number, "response": "well " * number} for number in range(1, 21)]


def test_long_rows_are_left_out_cut_or_refused(tmp_path):
    whole, _ = dataset_of(tmp_path / "whole", ROWS)
    examples = whole.examples(range(20))
    limits = {"max_prompt_length": 30, "max_response_length": 20}
    filtered, _ = dataset_of(tmp_path / "filtered", ROWS, **limits)
    short = [example for example in examples if len(example.token_ids) <= 50]
    assert 0 < len(short) < 20
    assert filtered.examples(range(len(filtered))) == short
    key = "data.max_prompt_length + data.max_response_length = 50 tokens"
    assert f"{20 - len(short)} left out, longer than {key}" in filtered.description()

    cut, _ = dataset_of(tmp_path / "cut", ROWS, truncation="truncate_left", **limits)
    for example, original in zip(cut.examples(range(20)), examples, strict=True):
        assert example.token_ids == original.token_ids[-50:]
        assert example.loss_mask == original.loss_mask[-50:]
    assert "cut at their beginning" in cut.description()

    with pytest.raises(ConfigError, match=rf"rows\.parquet, row {len(short)} has"):
        dataset_of(tmp_path / "refused", ROWS, truncation="error", **limits)


def test_a_bos_that_stays_in_front_of_a_cut_row_is_not_learned(tmp_path):
    model = {"template": INST, "bos": "<s>", "eos": "</s>"}
    limits = {"max_prompt_length": 5, "max_response_length": 5}
    rows = [{"prompt": "Hi", "response": "well " * 20}]
    dataset, chat = dataset_of(tmp_path, rows, model=model, truncation="truncate_left", **limits)
    example = dataset[0]
    assert len(example.token_ids) == 10
    assert example.token_ids[0] == chat.tokenizer.bos_token_id
    assert example.loss_mask == [0] + [1] * 9


def test_a_template_that_rewrites_a_conversation_is_refused_only_where_it_does(tmp_path):
    plain = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>x</think>well"}]
    dataset, chat = dataset_of(tmp_path / "one", [{"messages": plain}], model={"template": REWRITING})
    assert learned_texts(dataset[0], chat) == ["<think>x</think>well<|im_end|>"]
    # Of an earlier turn, the template leaves the answer out of the reasoning; what it shows is learned.
    dataset, chat = dataset_of(tmp_path / "two", [{"messages": plain * 2}], model={"template": REWRITING})
    assert learned_texts(dataset[0], chat) == ["well<|im_end|>", "<think>x</think>well<|im_end|>"]


FORCED_THINKING = CHATML.replace("'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}")

BAD_TEMPLATES = {
    "answers without an end token": ({"template": UNCLOSED}, "does not write an end token"),
    "an end token that it never writes": ({"eos": "</s>"}, "does not close with an end token"),
    "a generation prompt that is not in the conversation": ({"template": FORCED_THINKING}, "generation prompt"),
}


@pytest.mark.parametrize(("model", "words"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES.keys())
def test_a_template_that_hides_the_answers_is_refused_at_once(model, words, tmp_path):
    with pytest.raises(ConfigError) as error:
        dataset_of(tmp_path, [{"messages": CONVERSATION}], model=model)
    for word in (words, "model.path", "{% generation %}"):
        assert word in str(error.value)


BAD_ROWS = {
    "no answer": ({"messages": CONVERSATION[:2]}, "column 'messages' has no assistant message"),
    "an answer to nothing": ({"messages": CONVERSATION[2:]}, "begins with an assistant message"),
    "null messages": ({"messages": None}, "column 'messages' is null"),
    "an empty response": ({"prompt": "Hi", "response": " "}, "column 'response' is empty"),
    "a null response": ({"prompt": "Hi", "response": None}, "column 'response' is null"),
    "an empty prompt": ({"prompt": "", "response": "well"}, "column 'prompt' is empty"),
}


@pytest.mark.parametrize(("bad", "words"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_named_with_file_and_column(bad, words, tmp_path):
    good = {"messages": CONVERSATION} if "messages" in bad else {"prompt": "Hi", "response": "well"}
    with pytest.raises(ConfigError) as error:
        dataset_of(tmp_path, [good, good, bad])
    assert "rows.parquet, row 2: " in str(error.value) and words in str(error.value)


def test_marks_that_miss_an_answer_are_noticed(tmp_path):
    template = CHATML_MARKED.replace(
        "{% if message['role'] == 'assistant' %}{% generation %}",
        "{% if message['role'] == 'assistant' and loop.last %}{% generation %}",
    )
    with pytest.raises(ConfigError, match="3 assistant messages, but the model's chat template marks 1"):
        dataset_of(tmp_path, [{"messages": CONVERSATION}], model={"template": template})


def test_columns_that_are_neither_form_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no column 'prompt'.*it has text"):
        dataset_of(tmp_path, [{"text": "Hi"}])


def test_files_of_two_forms_are_refused(tmp_path):
    chat = load_chat_tokenizer(make_chat_model(tmp_path / "model"))
    files = [
        write(tmp_path / "a.parquet", [{"messages": CONVERSATION}]),
        write(tmp_path / "b.parquet", [{"prompt": "Hi", "response": "well"}]),
    ]
    with pytest.raises(ConfigError, match=r"b\.parquet: there is no column 'messages'"):
        SftDataset(files, chat, DataConfig())
