"""The model's tokenizer gives every conversation exactly one BOS, and a model that cannot chat is refused."""

import json

import pytest

from megarl.config import ConfigError
from megarl.data.chat import UnusableMessages, load_chat_tokenizer, read_messages
from tests.data.chat_models import CHATML, INST, INST_WITHOUT_BOS, make_chat_model, write_config

QUESTION = [{"role": "user", "content": "What is two plus three?"}]


def prompt_ids(chat, messages):
    (ids,) = chat.encode([chat.render(messages, generation_prompt=True)])
    return ids


BOS_CASES = {
    "the template writes it": (INST, False, 1),
    "the tokenizer adds it": (INST_WITHOUT_BOS, True, 1),
    "both do": (INST, True, 1),
    "the template writes it twice": (INST.replace("{{ bos_token", "{{ bos_token + bos_token"), False, 1),
    "neither does": (INST_WITHOUT_BOS, False, 0),
}


@pytest.mark.parametrize(("template", "adds_bos", "expected"), BOS_CASES.values(), ids=BOS_CASES.keys())
def test_a_prompt_has_exactly_one_bos_where_the_model_has_one(template, adds_bos, expected, tmp_path):
    folder = make_chat_model(tmp_path, template=template, bos="<s>", eos="</s>", adds_bos=adds_bos)
    chat = load_chat_tokenizer(folder)
    ids = prompt_ids(chat, QUESTION)
    bos = chat.tokenizer.convert_tokens_to_ids("<s>")
    assert ids.count(bos) == expected
    assert ids[:expected] == [bos] * expected
    assert chat.tokenizer.decode(ids[expected:]) == "[INST] What is two plus three? [/INST]"


def test_a_format_that_begins_each_turn_with_bos_keeps_them(tmp_path):
    chat = load_chat_tokenizer(make_chat_model(tmp_path, template=INST, bos="<s>", eos="</s>", adds_bos=True))
    messages = [*QUESTION, {"role": "assistant", "content": "five"}, *QUESTION]
    ids = prompt_ids(chat, messages)
    question = "<s>[INST] What is two plus three? [/INST]"
    assert chat.tokenizer.decode(ids) == f"{question} five </s>{question}"


def test_a_bos_that_is_the_mark_of_a_message_stays_with_each_message(tmp_path):
    # SmolLM2 and others: bos_token is <|im_start|>.
    chat = load_chat_tokenizer(make_chat_model(tmp_path, bos="<|im_start|>"))
    assert chat.tokenizer.decode(prompt_ids(chat, QUESTION)) == (
        "<|im_start|>user\nWhat is two plus three?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_cutting_the_beginning_keeps_the_bos(tmp_path):
    chat = load_chat_tokenizer(make_chat_model(tmp_path, template=INST, bos="<s>", eos="</s>"))
    ids = prompt_ids(chat, QUESTION)
    assert [ids[i] for i in chat.last_positions(ids, 5)] == [ids[0], *ids[-4:]]
    assert chat.last_positions(ids, len(ids)) == list(range(len(ids)))
    without = ids[1:]
    assert [without[i] for i in chat.last_positions(without, 5)] == without[-5:]


def test_decoding_leaves_out_special_tokens(tmp_path):
    chat = load_chat_tokenizer(make_chat_model(tmp_path))
    ids = chat.tokenizer("naïve 😀 café<|im_end|>", add_special_tokens=False)["input_ids"]
    assert chat.decode(ids) == "naïve 😀 café"


@pytest.mark.parametrize(
    "more", [None, "</s>", ["</s>", "<|im_end|>", "<|endoftext|>"]], ids=["none", "one", "several"]
)
def test_end_tokens_are_the_tokenizers_and_those_of_the_generation_config(more, tmp_path):
    folder = make_chat_model(tmp_path)
    chat = load_chat_tokenizer(folder)
    names = [] if more is None else [more] if isinstance(more, str) else more
    to_id = chat.tokenizer.convert_tokens_to_ids
    eos = to_id(more) if isinstance(more, str) else [to_id(name) for name in names]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None if more is None else eos}))
    expected = sorted({to_id("<|im_end|>"), *(to_id(name) for name in names)})
    assert list(load_chat_tokenizer(folder).end_token_ids) == expected


def test_an_end_token_of_the_generation_config_is_enough(tmp_path):
    folder = make_chat_model(tmp_path, eos=None, generation_config={"eos_token_id": 3})
    assert load_chat_tokenizer(folder).end_token_ids == (3,)


def test_a_model_that_cannot_chat_is_refused_with_what_to_do(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    write_config(empty, 300)
    # transformers makes an empty tokenizer for this one, without a word.
    qwen = tmp_path / "qwen"
    qwen.mkdir()
    write_config(qwen, 300, model_type="qwen2")
    broken = make_chat_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{", encoding="utf-8")
    bad_generation = make_chat_model(tmp_path / "generation")
    (bad_generation / "generation_config.json").write_text("[]", encoding="utf-8")
    cases = {
        make_chat_model(tmp_path / "plain", template=None): ["no chat template", "chat_template.jinja"],
        make_chat_model(tmp_path / "endless", eos=None): ["no end token", "eos_token"],
        make_chat_model(tmp_path / "small", vocab_size=300): ["token ids up to", "vocab_size", "299"],
        empty: ["tokenizer", "tokenizer.json"],
        qwen: ["has no tokenizer", "tokenizer.json"],
        broken: ["cannot be loaded"],
        bad_generation: ["generation_config.json", "not a JSON object"],
        tmp_path / "nowhere": ["not a folder"],
    }
    for folder, words in cases.items():
        with pytest.raises(ConfigError) as error:
            load_chat_tokenizer(folder)
        for word in [str(folder), *words]:
            assert word in str(error.value), (folder, word)
        assert "\n" not in str(error.value)


def test_a_vocabulary_smaller_than_the_models_is_fine(tmp_path):
    chat = load_chat_tokenizer(make_chat_model(tmp_path, vocab_size=512))
    assert len(chat.tokenizer) < 512


def test_keys_that_are_null_are_left_out_of_messages():
    value = [{"role": "user", "content": "Hi", "tool_calls": None, "name": "Ann"}]
    assert read_messages(value) == [{"role": "user", "content": "Hi", "name": "Ann"}]


def test_an_empty_system_message_is_allowed_since_it_takes_a_templates_own_one_away():
    value = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]
    assert read_messages(value) == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is null"),
        ([], "has no messages"),
        ([{"role": "user", "content": None}], "without content"),
        ([{"role": None, "content": "Hi"}], "without role"),
        ([None], "without role"),
        ([{"role": "user", "content": " \n"}], "no text"),
        ([{"role": "system", "content": "Be brief."}], "no text"),
    ],
)
def test_messages_that_say_nothing_are_unusable(value, reason):
    with pytest.raises(UnusableMessages, match=reason):
        read_messages(value)


def test_what_the_template_refuses_is_unusable(tmp_path):
    template = CHATML.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception('no system role here') }}{% endif %}",
        1,
    )
    chat = load_chat_tokenizer(make_chat_model(tmp_path, template=template))
    with pytest.raises(UnusableMessages, match="no system role here"):
        chat.render([{"role": "system", "content": "Be brief."}, *QUESTION], generation_prompt=True)
