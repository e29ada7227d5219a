"""The model's tokenizer and chat template: from messages to token ids with exactly one BOS."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from megarl.config.errors import ConfigError
from megarl.config.model_shape import ModelShape

Message = dict[str, Any]
"""A chat message: `role`, `content`, and whatever else the model's template reads."""


class UnusableMessages(ValueError):
    """Why messages cannot be used: the end of a sentence, for the caller to begin with file, row and column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTokenizer:
    """A tokenizer whose model speaks in chat messages."""

    path: str
    """The model's folder, for errors."""
    tokenizer: transformers.PreTrainedTokenizerBase
    end_token_ids: tuple[int, ...]
    """What ends a response: the tokenizer's end token and those of generation_config.json, ascending."""
    adds_bos: bool
    """Whether the tokenizer itself puts its BOS before a text, as it was trained to be used."""

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The conversation as the chat template writes it, with or without the head of an assistant's turn at the end.

        Raises:
            UnusableMessages: the template refuses them.
        """
        with _refusals():
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt
            )

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as the template writes it, and the characters [start, stop) of its `{% generation %}` marks.

        transformers also offers these marks as a mask over tokens; that one loses the last bytes of a mark that ends
        in a character of several tokens (an emoji).

        Raises:
            UnusableMessages: the template refuses them.
        """
        with _refusals():
            (text,), (marks,) = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        return text, marks

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered conversations, with `one_bos`."""
        if not texts:  # which the tokenizer does not take
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [self.one_bos(ids)[0] for ids in encoded]

    def one_bos(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Ids that begin with one BOS, and how many tokens longer that made them (negative where BOS were dropped).

        Where the template wrote BOS, the ids have it already, perhaps twice; where it did not, it is added if the
        tokenizer adds it to a plain text. A model whose template and tokenizer both do without stays without (Qwen).
        Only the front counts: some formats write BOS before later turns too (Llama 2).
        """
        bos = self.tokenizer.bos_token_id
        found = 0
        while bos is not None and found < len(ids) and ids[found] == bos:
            found += 1
        wanted = 1 if found or self.adds_bos else 0
        return [bos] * wanted + list(ids[found:]), wanted - found

    def last_positions(self, ids: Sequence[int], length: int) -> list[int]:
        """Which `length` tokens stay where the beginning is cut off: the last ones, and the BOS if there is one."""
        if len(ids) <= length:
            return list(range(len(ids)))
        front = [0] if ids[0] == self.tokenizer.bos_token_id else []
        return [*front, *range(len(ids) - length + len(front), len(ids))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens: what graders read."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def load_chat_tokenizer(path: str | Path, key: str = "model.path") -> ChatTokenizer:
    """The tokenizer of a Hugging Face folder; nothing is downloaded.

    Args:
        key: of the config that names the folder, for errors.

    Raises:
        ConfigError: no tokenizer there, no chat template, no end token, or more tokens than the model has.
    """
    folder, where = Path(path), f"{key} {path}"
    tokenizer = _load_tokenizer(folder, where)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{where}: its tokenizer has no chat template; copy chat_template.jinja into the folder from "
            "the model's chat version, or write one."
        )
    _check_vocabulary(folder, tokenizer, where)
    return ChatTokenizer(
        path=str(folder),
        tokenizer=tokenizer,
        end_token_ids=_end_token_ids(folder, tokenizer, where),
        adds_bos=_adds_bos(tokenizer),
    )


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns what a template raises, or stumbles over, into `UnusableMessages`."""
    try:
        yield
    except (TemplateError, TypeError, ValueError) as error:
        raise UnusableMessages(f"is refused by the model's chat template ({error})") from None


@contextmanager
def in_column(where: str, column: str) -> Iterator[None]:
    """Turns `UnusableMessages` into a whole sentence.

    Raises:
        ConfigError: `where` (file and row), the column, and why its messages cannot be used.
    """
    try:
        yield
    except UnusableMessages as error:
        raise ConfigError(f"{where}: column '{column}' {error}.") from None


def read_messages(value: Any) -> list[Message]:
    """Checked chat messages of one row.

    Parquet gives every message the same keys, with null where a message had none; those are taken out again, since
    templates ask whether a key is there (`'tool_calls' in message`).

    Raises:
        UnusableMessages: no messages, one without role or content, or nothing but blanks in all but system messages.
    """
    if not value:
        raise UnusableMessages("has no messages" if value is not None else "is null")
    messages = [{key: item for key, item in (message or {}).items() if item is not None} for message in value]
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if key not in message:
                raise UnusableMessages(f"has a message without {key} (message {number})")
    if not any(message["content"].strip() for message in messages if message["role"] != "system"):
        raise UnusableMessages("has no text in its messages")
    return messages


def _load_tokenizer(folder: Path, where: str) -> transformers.PreTrainedTokenizerBase:
    if not folder.is_dir():
        raise ConfigError(f"{where} is not a folder.")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # every backend has errors of its own for a missing or broken file
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{where}: its tokenizer cannot be loaded ({reason}); copy tokenizer.json and "
            "tokenizer_config.json of the model into the folder."
        ) from error
    # transformers makes an empty tokenizer of some classes (Qwen2Tokenizer) where the files are missing.
    names = sorted(set(tokenizer.vocab_files_names.values()))
    if not any((folder / name).exists() for name in names):
        raise ConfigError(f"{where} has no tokenizer (none of {', '.join(names)}): copy it from the model.")
    return tokenizer


def _check_vocabulary(folder: Path, tokenizer: transformers.PreTrainedTokenizerBase, where: str) -> None:
    size = ModelShape.from_hf(folder).vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise ConfigError(
            f"{where}: its tokenizer has token ids up to {largest}, but the model's vocabulary "
            f"(vocab_size in config.json) ends at {size - 1}: use the tokenizer that belongs to the model."
        )


def _end_token_ids(folder: Path, tokenizer: transformers.PreTrainedTokenizerBase, where: str) -> tuple[int, ...]:
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    file = folder / "generation_config.json"
    if file.exists():
        try:
            more = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise ConfigError(f"{file} is not a JSON object ({error}): copy it from the model again.") from None
        ids |= set(more) if isinstance(more, list) else set() if more is None else {more}
    if not ids:
        raise ConfigError(
            f"{where}: its tokenizer has no end token, so no response would end; set eos_token in "
            "tokenizer_config.json, or eos_token_id in generation_config.json."
        )
    return tuple(sorted(ids))


def _adds_bos(tokenizer: transformers.PreTrainedTokenizerBase) -> bool:
    text = "a"
    return tokenizer.bos_token_id is not None and tokenizer(text)["input_ids"][:1] == [tokenizer.bos_token_id]
