"""Single responses, each good or bad: rows of their own, or the two responses of each pair."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.config.errors import ConfigError
from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import ChatTokenizer, in_column
from megarl.data.encoded import Encoded, EncodedRows
from megarl.data.lengths import LengthRule, Progress, usable_rows
from megarl.data.pairs import Conversation, PairDataset, response_messages
from megarl.data.parquet import CHAT_TYPE, Column, ParquetRows, is_chat, is_text, read_schema
from megarl.data.sft import prompt_messages
from megarl.data.turns import TurnMasker


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledExample:
    """One response."""

    row: int
    """Number of the row over all files of the dataset, before filtering."""
    conversation: Conversation
    desirable: bool


class LabelledDataset:
    """The usable rows of files with a label for each response, numbered from 0.

    A row has a prompt, text or messages (`data.prompt_key`), a response in the same forms (`data.response_key`), and
    whether it is a good one (`data.label_key`), true or false, or 1 or 0.
    """

    def __init__(
        self, files: Sequence[str], chat: ChatTokenizer, config: DataConfig, progress: Progress | None = None
    ) -> None:
        """Checks every row and counts its tokens.

        Args:
            files: at least one parquet file.
            progress: told how far the counting is, every 10,000 rows.

        Raises:
            ConfigError: the first file, column or row that cannot be used, or none left.
        """
        self._chat = chat
        self._keys = config
        self._masker = TurnMasker(chat)
        self._rows = ParquetRows(files, _columns(config))
        self._rule = LengthRule.of_conversations(config)
        self._encoded = EncodedRows()
        labels: list[bool] = []
        self._usable = usable_rows(self._rows, functools.partial(self._count_tokens, labels), self._rule, progress)
        self._labels = np.array(labels, dtype=bool)[self._usable.rows]

    def __len__(self) -> int:
        return len(self._usable)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int32 [len(self)]."""
        return self._usable.lengths

    @property
    def fingerprint(self) -> str:
        """Of the rows in the files (`Fingerprint`)."""
        return self._usable.fingerprint

    @property
    def labels(self) -> np.ndarray:
        """Whether each response is a good one, bool [len(self)]."""
        return self._labels

    def examples(self, indices: Sequence[int]) -> list[LabelledExample]:
        """Examples by their numbers among the usable rows. One call for a batch is faster than a call for each."""
        numbers = self._usable.rows[list(indices)].tolist()
        to_read = [number for number in numbers if number not in self._encoded]
        read = dict(zip(to_read, self._rows.read(to_read), strict=True))
        return [
            LabelledExample(
                row=number,
                conversation=self._cut(self._encode(number, read[number]) if number in read else self._encoded[number]),
                desirable=bool(self._labels[index]),
            )
            for index, number in zip(indices, numbers, strict=True)
        ]

    def description(self) -> str:
        """How many rows are used, how many are left out and why; for rank 0 to print."""
        return f"{', '.join(self._rows.files)}: {self._usable.description()}; {_balance(self._labels)}."

    def _count_tokens(self, labels: list[bool], first: int, rows: list[dict[str, Any]]) -> list[int]:
        """Adds the rows' labels to `labels`."""
        counts = []
        for number, row in enumerate(rows, first):
            labels.append(self._label(number, row))
            encoded = self._encode(number, row)
            self._encoded.add(number, encoded)
            counts.append(len(encoded[0]))
        return counts

    def _label(self, number: int, row: dict[str, Any]) -> bool:
        label = row[self._keys.label_key]
        if label not in (0, 1):  # True and False are equal to these
            raise ConfigError(
                f"{self._rows.where(number)}: column '{self._keys.label_key}' is {label}, but must be true or false."
            )
        return bool(label)

    def _encode(self, number: int, row: dict[str, Any]) -> Encoded:
        where, keys = self._rows.where(number), self._keys
        with in_column(where, keys.prompt_key):
            prompt = prompt_messages(row[keys.prompt_key])
        with in_column(where, keys.response_key):
            response = response_messages(row[keys.response_key], prompt)
            return self._masker.encode([*prompt, *response], learn_from=len(prompt))

    def _cut(self, encoded: Encoded) -> Conversation:
        ids, mask = encoded
        kept = self._chat.last_positions(ids, self._rule.max_tokens)
        return Conversation(token_ids=[ids[i] for i in kept], loss_mask=[mask[i] for i in kept])


class SplitPairs:
    """The responses of pairs as single ones: 2i is the chosen response of pair i, 2i + 1 the rejected one."""

    def __init__(self, pairs: PairDataset) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int32 [len(self)]."""
        return self._pairs.lengths.ravel()

    @property
    def fingerprint(self) -> str:
        """Of the rows in the files (`Fingerprint`)."""
        return self._pairs.fingerprint

    @property
    def labels(self) -> np.ndarray:
        """Whether each response is a good one, bool [len(self)]."""
        return np.arange(len(self)) % 2 == 0

    def examples(self, indices: Sequence[int]) -> list[LabelledExample]:
        """Examples by their numbers."""
        pairs = self._pairs.examples([index // 2 for index in indices])
        return [
            LabelledExample(
                row=pair.row,
                conversation=pair.rejected if index % 2 else pair.chosen,
                desirable=index % 2 == 0,
            )
            for index, pair in zip(indices, pairs, strict=True)
        ]

    def description(self) -> str:
        """How many rows are used, how many are left out and why; for rank 0 to print."""
        return f"{self._pairs.description()} Each is two responses: {_balance(self.labels)}."


LabelledData = LabelledDataset | SplitPairs


def load_labelled(files: Sequence[str], chat: ChatTokenizer, config: DataConfig) -> LabelledData:
    """Labelled responses where the first file has a label, and else the responses of pairs.

    Raises:
        ConfigError: see `LabelledDataset` and `PairDataset`.
    """
    if config.label_key not in read_schema(files[0]).names:
        return SplitPairs(PairDataset(files, chat, config))
    return LabelledDataset(files, chat, config)


def next_different(values: Sequence[int]) -> np.ndarray:
    """Of each place the next one that holds another value, int64 [places]; behind the last comes the first.

    Where all values are one, some place.
    """
    size = len(values)
    found = np.arange(1, size + 1) % size
    # From the back, and around twice: a run of equal values at the end may go on at the beginning.
    for index in range(2 * size - 1, -1, -1):
        own, following = index % size, (index + 1) % size
        found[own] = following if values[own] != values[following] else found[following]
    return found


def _balance(labels: np.ndarray) -> str:
    good = int(labels.sum())
    return f"{good:,} good and {len(labels) - good:,} bad responses"


def _columns(config: DataConfig) -> list[Column]:
    text_or_chat = lambda kind: is_text(kind) or is_chat(kind)
    is_label = lambda kind: pa.types.is_boolean(kind) or pa.types.is_integer(kind)
    return [
        Column(name=config.prompt_key, accepts=text_or_chat, expected=f"text or {CHAT_TYPE}"),
        Column(name=config.response_key, accepts=text_or_chat, expected=f"text or {CHAT_TYPE}"),
        Column(name=config.label_key, accepts=is_label, expected="true or false"),
    ]
