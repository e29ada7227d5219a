"""Pairs of responses to a prompt, of which one is preferred: token ids, loss masks and margins."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.config.errors import ConfigError
from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import ChatTokenizer, Message, UnusableMessages, in_column, read_messages
from megarl.data.encoded import Encoded, EncodedRows
from megarl.data.lengths import LengthRule, Progress, UsableRows, usable_rows
from megarl.data.parquet import CHAT_TYPE, Column, ParquetRows, is_chat, is_text
from megarl.data.sft import filled_text, prompt_messages
from megarl.data.turns import TurnMasker

_CHOSEN, _REJECTED = 0, 1
_SAME = 0
"""The length that stands for a row whose two responses are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A prompt with one of its responses."""

    token_ids: list[int]
    """As the chat template writes it, with exactly one BOS (where the model has one)."""
    loss_mask: list[int]
    """1 for the tokens of the response, 0 elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairExample:
    """One row."""

    row: int
    """Number of the row over all files of the dataset, before filtering."""
    chosen: Conversation
    rejected: Conversation
    margin: float
    """How much better the chosen one is; 0 where the data does not say."""


class PairDataset:
    """The usable rows of preference files, numbered from 0. Each is tokenised once, as far as there is room.

    A row has a prompt, text or messages (`data.prompt_key`), and two responses (`data.chosen_key`,
    `data.rejected_key`): texts, messages that continue the prompt, or whole conversations that begin with it. It may
    have a margin (`data.margin_key`). Rows whose two responses are the same teach nothing: they are counted and left
    out.
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
        lengths: list[tuple[int, int]] = []
        count = functools.partial(self._count_tokens, lengths)
        everything = usable_rows(self._rows, count, self._rule, progress)
        self._num_same = int((everything.lengths == _SAME).sum())
        self._usable = self._without_same(everything)
        uncut = np.array(lengths, dtype=np.int32)[self._usable.rows]
        self._lengths = np.minimum(uncut, self._rule.max_tokens)

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: int) -> PairExample:
        return self.examples([index])[0]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the chosen and the rejected conversation, int32 [len(self), 2]."""
        return self._lengths

    @property
    def fingerprint(self) -> str:
        """Of the rows in the files (`Fingerprint`)."""
        return self._usable.fingerprint

    @property
    def num_same(self) -> int:
        """Rows that were left out because their two responses are the same."""
        return self._num_same

    def examples(self, indices: Sequence[int]) -> list[PairExample]:
        """Examples by their numbers among the usable rows. One call for a batch is faster than a call for each."""
        numbers = self._usable.rows[list(indices)].tolist()
        return [self._example(number, row) for number, row in zip(numbers, self._rows.read(numbers), strict=True)]

    def description(self) -> str:
        """How many rows are used, how many are left out and why; for rank 0 to print."""
        same = f"; {self._num_same:,} more left out, whose two responses are the same" if self._num_same else ""
        return f"{', '.join(self._rows.files)}: {self._usable.description()}{same}."

    def _without_same(self, everything: UsableRows) -> UsableRows:
        different = everything.lengths != _SAME
        if not different.any():
            longer = f", and the others are longer than {self._rule.keys} = {self._rule.max_tokens} tokens"
            raise ConfigError(
                f"{', '.join(self._rows.files)}: no pair is left; in {self._num_same} of {len(self._rows)} rows "
                f"'{self._keys.chosen_key}' and '{self._keys.rejected_key}' are the same"
                f"{longer if self._num_same < len(self._rows) else ''}."
            )
        return dataclasses.replace(
            everything,
            rows=everything.rows[different],
            lengths=everything.lengths[different],
            num_rows=everything.num_rows - self._num_same,
        )

    def _count_tokens(self, lengths: list[tuple[int, int]], first: int, rows: list[dict[str, Any]]) -> list[int]:
        """Of the longer conversation; `_SAME` where the two are the same. Adds those of both to `lengths`."""
        counts = []
        for number, row in enumerate(rows, first):
            self._margin(number, row)
            pair = self._encode(number, row)
            is_same = pair[_CHOSEN][0] == pair[_REJECTED][0]
            if not is_same:
                for side, encoded in enumerate(pair):
                    self._encoded.add(2 * number + side, encoded)
            lengths.append((len(pair[_CHOSEN][0]), len(pair[_REJECTED][0])))
            counts.append(_SAME if is_same else max(lengths[-1]))
        return counts

    def _example(self, number: int, row: dict[str, Any]) -> PairExample:
        keys = (2 * number + _CHOSEN, 2 * number + _REJECTED)
        is_kept = all(key in self._encoded for key in keys)
        pair = [self._encoded[key] for key in keys] if is_kept else self._encode(number, row)
        chosen, rejected = (self._cut(encoded) for encoded in pair)
        return PairExample(row=number, chosen=chosen, rejected=rejected, margin=self._margin(number, row))

    def _cut(self, encoded: Encoded) -> Conversation:
        ids, mask = encoded
        kept = self._chat.last_positions(ids, self._rule.max_tokens)
        return Conversation(token_ids=[ids[i] for i in kept], loss_mask=[mask[i] for i in kept])

    def _encode(self, number: int, row: dict[str, Any]) -> list[Encoded]:
        where, keys = self._rows.where(number), self._keys
        with in_column(where, keys.prompt_key):
            prompt = prompt_messages(row[keys.prompt_key])
        pair = []
        for key in (keys.chosen_key, keys.rejected_key):
            with in_column(where, key):
                pair.append(
                    self._masker.encode([*prompt, *response_messages(row[key], prompt)], learn_from=len(prompt))
                )
        return pair

    def _margin(self, number: int, row: dict[str, Any]) -> float:
        margin = row[self._keys.margin_key]
        if margin is None:
            return 0.0
        if not math.isfinite(margin):
            raise ConfigError(f"{self._rows.where(number)}: column '{self._keys.margin_key}' is {margin}, no number.")
        return float(margin)


def _columns(config: DataConfig) -> list[Column]:
    required = (config.prompt_key, config.chosen_key, config.rejected_key)
    return [
        *(Column(name=name, accepts=_is_text_or_chat, expected=f"text or {CHAT_TYPE}") for name in required),
        Column(name=config.margin_key, accepts=_is_number, expected="a number", required=False),
    ]


def _is_text_or_chat(kind: pa.DataType) -> bool:
    return is_text(kind) or is_chat(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def response_messages(value: Any, prompt: Sequence[Message]) -> list[Message]:
    """The messages of a response, which follow the prompt.

    Args:
        value: a text, messages, or a whole conversation that begins with the prompt.

    Raises:
        UnusableMessages: there is no text, or it is another conversation.
    """
    if value is None or isinstance(value, str):
        return [{"role": "assistant", "content": filled_text(value)}]
    messages = read_messages(value)
    if messages[: len(prompt)] == list(prompt):
        messages = messages[len(prompt) :]
    if not messages or messages[0]["role"] != "assistant":
        raise UnusableMessages("neither begins with the prompt's messages nor goes on with an assistant message")
    return messages
