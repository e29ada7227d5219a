"""Prompts with a response that is worth imitating: what SPIN pairs the policy's own responses with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import ChatTokenizer, Message, in_column
from megarl.data.lengths import LengthRule, usable_rows
from megarl.data.parquet import CHAT_TYPE, Column, ParquetRows, is_chat, is_text
from megarl.data.sample import Prompt
from megarl.data.sft import filled_text, prompt_messages


class Demonstrations:
    """The usable rows of files with a prompt, text or messages (`data.prompt_key`), and a response, text
    (`data.response_key`), numbered from 0."""

    def __init__(self, files: Sequence[str], chat: ChatTokenizer, config: DataConfig) -> None:
        """Checks every row and counts the tokens of its prompt.

        Raises:
            ConfigError: the first file, column or row that cannot be used, or none left.
        """
        self._chat = chat
        self._keys = config
        self._rows = ParquetRows(files, _columns(config))
        self._rule = LengthRule(
            max_tokens=config.max_prompt_length, truncation=config.truncation, keys="data.max_prompt_length"
        )
        self._usable = usable_rows(self._rows, self._count_tokens, self._rule)

    def __len__(self) -> int:
        return len(self._usable)

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """Prompts by their numbers among the usable rows."""
        numbers = self._usable.rows[list(indices)].tolist()
        messages = [self._messages(number, row) for number, row in zip(numbers, self._rows.read(numbers), strict=True)]
        encoded = self._chat.encode([self._chat.render(item, generation_prompt=True) for item in messages])
        return [
            Prompt(
                row=number,
                token_ids=[ids[place] for place in self._chat.last_positions(ids, self._rule.max_tokens)],
                messages=item,
                data_source="",
            )
            for number, ids, item in zip(numbers, encoded, messages, strict=True)
        ]

    def responses(self, indices: Sequence[int]) -> list[str]:
        """The responses to `prompts(indices)`."""
        numbers = self._usable.rows[list(indices)].tolist()
        return [row[self._keys.response_key] for row in self._rows.read(numbers)]

    def description(self) -> str:
        """How many rows are used, how many are left out and why; for rank 0 to print."""
        return f"{', '.join(self._rows.files)}: {self._usable.description()}."

    def _count_tokens(self, first: int, rows: list[dict[str, Any]]) -> list[int]:
        texts = []
        for number, row in enumerate(rows, first):
            with in_column(self._rows.where(number), self._keys.response_key):
                filled_text(row[self._keys.response_key])
            messages = self._messages(number, row)
            with in_column(self._rows.where(number), self._keys.prompt_key):
                texts.append(self._chat.render(messages, generation_prompt=True))
        return [len(ids) for ids in self._chat.encode(texts)]

    def _messages(self, number: int, row: dict[str, Any]) -> list[Message]:
        with in_column(self._rows.where(number), self._keys.prompt_key):
            return prompt_messages(row[self._keys.prompt_key])


def _columns(config: DataConfig) -> list[Column]:
    return [
        Column(
            name=config.prompt_key, accepts=lambda kind: is_text(kind) or is_chat(kind), expected=f"text or {CHAT_TYPE}"
        ),
        Column(name=config.response_key, accepts=is_text, expected="text"),
    ]
