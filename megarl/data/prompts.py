"""Prompts to generate from: rows in verl's columns, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.config.errors import ConfigError
from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import ChatTokenizer, in_column, read_messages
from megarl.data.lengths import LengthRule, Progress, usable_rows
from megarl.data.parquet import CHAT_TYPE, Column, ParquetRows, is_chat, is_text
from megarl.data.sample import Prompt


class PromptDataset:
    """The usable rows of prompt files, numbered from 0. Text stays in the files until a row is drawn."""

    def __init__(
        self, files: Sequence[str], chat: ChatTokenizer, config: DataConfig, progress: Progress | None = None
    ) -> None:
        """Checks every row and counts its tokens.

        Args:
            files: parquet files with the columns `data_source`, `config.prompt_key`, and, optionally, `reward_model`
                and `extra_info`.
            progress: told how far the counting is, every 10,000 rows.

        Raises:
            ConfigError: the first file, column or row that cannot be used; or none left.
        """
        self._chat = chat
        self._prompt_key = config.prompt_key
        self._rows = ParquetRows(files, _columns(config.prompt_key))
        self._rule = LengthRule(
            max_tokens=config.max_prompt_length, truncation=config.truncation, keys="data.max_prompt_length"
        )
        self._sources: set[tuple[str, str | None]] = set()
        self._usable = usable_rows(self._rows, self._count_tokens, self._rule, progress)

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts([index])[0]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt, int32 [len(self)]."""
        return self._usable.lengths

    @property
    def fingerprint(self) -> str:
        """Of the rows in the files (`Fingerprint`)."""
        return self._usable.fingerprint

    @property
    def row_numbers(self) -> np.ndarray:
        """The row over all files that each prompt is, int64 [len(self)]."""
        return self._usable.rows

    @property
    def sources(self) -> frozenset[tuple[str, str | None]]:
        """(`data_source`, `reward_model.style`) of all rows: what their graders are chosen by."""
        return frozenset(self._sources)

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """Prompts by their numbers among the usable rows. One call for a batch is faster than a call for each."""
        numbers = self._usable.rows[list(indices)].tolist()
        rows = self._rows.read(numbers)
        messages = [read_messages(row[self._prompt_key]) for row in rows]
        texts = [self._chat.render(item, generation_prompt=True) for item in messages]
        encoded = self._chat.encode(texts)
        return [
            Prompt(
                row=number,
                token_ids=[ids[position] for position in self._chat.last_positions(ids, self._rule.max_tokens)],
                messages=item,
                data_source=row["data_source"],
                reward_model=row["reward_model"] or {},
                extra_info=row["extra_info"] or {},
            )
            for number, ids, item, row in zip(numbers, encoded, messages, rows, strict=True)
        ]

    def description(self) -> str:
        """How many rows are used, how many are left out and why; for rank 0 to print."""
        return f"{', '.join(self._rows.files)}: {self._usable.description()}."

    def _count_tokens(self, first: int, rows: list[dict[str, Any]]) -> list[int]:
        texts = [self._text(first + offset, row) for offset, row in enumerate(rows)]
        self._sources.update((row["data_source"], (row["reward_model"] or {}).get("style")) for row in rows)
        return [len(ids) for ids in self._chat.encode(texts)]

    def _text(self, number: int, row: dict[str, Any]) -> str:
        if not row["data_source"]:
            raise ConfigError(f"{self._rows.where(number)}: column 'data_source' is null or empty.")
        with in_column(self._rows.where(number), self._prompt_key):
            return self._chat.render(read_messages(row[self._prompt_key]), generation_prompt=True)


def _columns(prompt_key: str) -> list[Column]:
    return [
        Column(name="data_source", accepts=is_text, expected="text"),
        Column(name=prompt_key, accepts=is_chat, expected=CHAT_TYPE),
        Column(name="reward_model", accepts=pa.types.is_struct, expected="a struct", required=False),
        Column(name="extra_info", accepts=pa.types.is_struct, expected="a struct", required=False),
    ]
