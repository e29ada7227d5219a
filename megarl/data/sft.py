"""Conversations for supervised fine-tuning: token ids, and a loss mask over what the assistant wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import ChatTokenizer, Message, UnusableMessages, in_column, read_messages
from megarl.data.encoded import Encoded, EncodedRows
from megarl.data.lengths import LengthRule, Progress, usable_rows
from megarl.data.parquet import CHAT_TYPE, Column, ParquetRows, is_chat, is_text, read_schema
from megarl.data.turns import TurnMasker


@dataclass(kw_only=True, slots=True)
class SftExample:
    """One row, ready to learn from."""

    row: int
    """Number of the row over all files of the dataset, before filtering."""
    token_ids: list[int]
    """The whole conversation as the chat template writes it, with exactly one BOS (where the model has one)."""
    loss_mask: list[int]
    """1 where the token is to be learned (predicted from those before it), 0 elsewhere."""


class SftDataset:
    """The usable rows of SFT files, numbered from 0. Each is tokenised once, as far as there is room (`encoded`).

    Rows are whole conversations (`data.messages_key`, where the first file has that column), of which every assistant
    turn is learned; or a prompt, text or messages (`data.prompt_key`), with the text of its response
    (`data.response_key`), which alone is learned. All files have the same form.
    """

    def __init__(
        self, files: Sequence[str], chat: ChatTokenizer, config: DataConfig, progress: Progress | None = None
    ) -> None:
        """Checks every row and counts its tokens.

        Args:
            files: at least one parquet file.
            progress: told how far the counting is, every 10,000 rows.

        Raises:
            ConfigError: the first file, column or row that cannot be used, or none left; a chat template that does not
                show what the assistant wrote.
        """
        self._chat = chat
        self._keys = config
        self._masker = TurnMasker(chat)
        self._has_messages = config.messages_key in read_schema(files[0]).names
        self._rows = ParquetRows(files, _columns(config, has_messages=self._has_messages))
        self._rule = LengthRule.of_conversations(config)
        self._encoded = EncodedRows()
        self._usable = usable_rows(self._rows, self._count_tokens, self._rule, progress)

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: int) -> SftExample:
        return self.examples([index])[0]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int32 [len(self)]."""
        return self._usable.lengths

    @property
    def fingerprint(self) -> str:
        """Of the rows in the files (`Fingerprint`)."""
        return self._usable.fingerprint

    def examples(self, indices: Sequence[int]) -> list[SftExample]:
        """Examples by their numbers among the usable rows. One call for a batch is faster than a call for each."""
        numbers = self._usable.rows[list(indices)].tolist()
        to_read = [number for number in numbers if number not in self._encoded]
        read = dict(zip(to_read, self._rows.read(to_read), strict=True))
        return [
            self._example(number, self._encode(number, read[number]) if number in read else self._encoded[number])
            for number in numbers
        ]

    def description(self) -> str:
        """How many rows are used, how many are left out and why; for rank 0 to print."""
        return f"{', '.join(self._rows.files)}: {self._usable.description()}."

    def _example(self, number: int, encoded: Encoded) -> SftExample:
        ids, mask = encoded
        kept = self._chat.last_positions(ids, self._rule.max_tokens)
        return SftExample(row=number, token_ids=[ids[i] for i in kept], loss_mask=[mask[i] for i in kept])

    def _count_tokens(self, first: int, rows: list[dict[str, Any]]) -> list[int]:
        lengths = []
        for number, row in enumerate(rows, first):
            encoded = self._encode(number, row)
            self._encoded.add(number, encoded)
            lengths.append(len(encoded[0]))
        return lengths

    def _encode(self, number: int, row: dict[str, Any]) -> Encoded:
        where = self._rows.where(number)
        if self._has_messages:
            with in_column(where, self._keys.messages_key):
                return self._masker.encode(read_messages(row[self._keys.messages_key]))
        with in_column(where, self._keys.prompt_key):
            prompt = prompt_messages(row[self._keys.prompt_key])
        with in_column(where, self._keys.response_key):
            response = {"role": "assistant", "content": filled_text(row[self._keys.response_key])}
            return self._masker.encode([*prompt, response], learn_from=len(prompt))


def _columns(config: DataConfig, *, has_messages: bool) -> list[Column]:
    if has_messages:
        return [Column(name=config.messages_key, accepts=is_chat, expected=CHAT_TYPE)]
    prompt = Column(
        name=config.prompt_key, accepts=lambda kind: is_text(kind) or is_chat(kind), expected=f"text or {CHAT_TYPE}"
    )
    return [prompt, Column(name=config.response_key, accepts=is_text, expected="text")]


def prompt_messages(value: Any) -> list[Message]:
    """A prompt, text or messages, as messages.

    Raises:
        UnusableMessages: it has none, or no text.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": filled_text(value)}]
    return read_messages(value)


def filled_text(value: str | None) -> str:
    """A text that has one.

    Raises:
        UnusableMessages: it is null, or nothing but blanks.
    """
    if value is None or not value.strip():
        raise UnusableMessages("is null" if value is None else "is empty")
    return value
