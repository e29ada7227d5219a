"""The columns of rows that have responses: read, checked, and brought to token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.config.errors import ConfigError
from megarl.config.model_shape import ModelShape
from megarl.config.schema_inputs import DataConfig
from megarl.data.chat import ChatTokenizer
from megarl.data.parquet import Column, ParquetRows, is_text

LARGEST_LOGPROB = 0.01
"""Log-probs are at most 0; rounding may leave one of a sure token a little above (bfloat16). What is larger is none:
probabilities, mostly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One response of a row."""

    token_ids: list[int]
    is_ended: bool
    """Whether its last token is an end token."""
    reward: float | None
    """None where the data has no rewards."""
    logprobs: list[float] | None
    """One for each token; None where the data has none."""


class ResponseRows:
    """Reads `data.responses_key`, and where there are such `data.rewards_key` and `data.logprobs_key`.

    A text is tokenised as it is, as the model would have generated it, and gets the tokenizer's end token if it has
    none. Token ids are taken as they are.
    """

    def __init__(self, files: Sequence[str], chat: ChatTokenizer, config: DataConfig, *, at_least: int) -> None:
        """Args:
            at_least: responses that each row must have.

        Raises:
            ConfigError: a file or a column that cannot be used.
        """
        self._chat = chat
        self._config = config
        self._at_least = at_least
        self._ends = frozenset(chat.end_token_ids)
        own_end = chat.tokenizer.eos_token_id
        self._end = chat.end_token_ids[0] if own_end is None else own_end
        self._vocab_size = ModelShape.from_hf(chat.path).vocab_size
        self._rows = ParquetRows(files, _columns(config))
        first = self._rows[0]
        self.has_rewards = first[config.rewards_key] is not None
        """Whether the data has rewards: those of the first row, which all others must be like."""
        self.has_logprobs = first[config.logprobs_key] is not None
        """Whether the data has log-probs, in the same way."""

    @property
    def files(self) -> list[str]:
        """The files that are read."""
        return self._rows.files

    def read(self, numbers: Sequence[int]) -> list[list[Response]]:
        """All responses of rows, whatever their length; each row group among them is decoded at most once.

        Args:
            numbers: of rows over all files.

        Raises:
            ConfigError: the first of them that cannot be used, by file and row.
        """
        return [self._parse(number, row) for number, row in zip(numbers, self._rows.read(numbers), strict=True)]

    def fitting(self, number: int, responses: Sequence[Response]) -> list[Response]:
        """Those of a row's responses that `data.max_response_length` leaves, by the rule of `data.truncation`.

        Raises:
            ConfigError: a longer one where the rule is `error`, or where cutting it would leave a reward that was given
                for the whole.
        """
        limit, rule = self._config.max_response_length, self._config.truncation
        kept = []
        for place, response in enumerate(responses):
            length = len(response.token_ids)
            if length <= limit:
                kept.append(response)
            elif rule == "error":
                raise self._unusable(
                    number,
                    self._config.responses_key,
                    f"has a response of {length} tokens (number {place}), more than data.max_response_length = "
                    f"{limit}: raise it, or set data.truncation to filter",
                )
            elif rule == "truncate_left":
                kept.append(self._cut(number, place, response))
        return kept

    def _cut(self, number: int, place: int, response: Response) -> Response:
        """The beginning of a response, which is what generation with this limit would have given."""
        config, limit = self._config, self._config.max_response_length
        if response.reward is not None:
            raise self._unusable(
                number,
                config.rewards_key,
                f"rewards a whole response (number {place}), of which data.max_response_length = {limit} would leave a "
                "part: raise it, set data.truncation to filter, or leave the rewards out",
            )
        return dataclasses.replace(
            response,
            token_ids=response.token_ids[:limit],
            is_ended=False,
            logprobs=None if response.logprobs is None else response.logprobs[:limit],
        )

    def _parse(self, number: int, row: dict[str, Any]) -> list[Response]:
        key = self._config.responses_key
        values = row[key]
        if not values:
            raise self._unusable(number, key, "has no responses" if values is not None else "is null")
        if len(values) < self._at_least:
            raise self._unusable(
                number,
                key,
                f"has {len(values)} responses, but rollout.n is {self._at_least}: lower it, or leave the row out",
            )
        sequences = self._token_ids(number, values)
        rewards = self._rewards(number, row, len(values))
        logprobs = self._logprobs(number, row, sequences, are_texts=isinstance(values[0], str))
        return [
            Response(token_ids=ids, is_ended=ids[-1] in self._ends, reward=reward, logprobs=of_tokens)
            for ids, reward, of_tokens in zip(sequences, rewards, logprobs, strict=True)
        ]

    def _token_ids(self, number: int, values: Sequence[str | list[int] | None]) -> list[list[int]]:
        key = self._config.responses_key
        for place, value in enumerate(values):
            if not value or (isinstance(value, str) and not value.strip()):
                raise self._unusable(number, key, f"has a response that is null or empty (number {place})")
        sequences = self._tokenise(values) if isinstance(values[0], str) else values
        for place, ids in enumerate(sequences):
            if None in ids or min(ids) < 0 or max(ids) >= self._vocab_size:
                raise self._unusable(
                    number,
                    key,
                    f"has a token id outside the model's vocabulary of {self._vocab_size} (response {place}): the ids "
                    "must be those of model.path's tokenizer",
                )
            if not self._ends.isdisjoint(ids[:-1]):
                raise self._unusable(
                    number,
                    key,
                    f"has an end token within a response (number {place}), where the model would have stopped: cut "
                    "what follows it",
                )
        return sequences

    def _tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._chat.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [ids if ids[-1] in self._ends else [*ids, self._end] for ids in encoded]

    def _rewards(self, number: int, row: dict[str, Any], count: int) -> Sequence[float | None]:
        key = self._config.rewards_key
        values = self._beside(number, row, key, count, is_expected=self.has_rewards)
        if values is None:
            return [None] * count
        numbers = np.array(values, dtype=np.float64)  # null becomes NaN
        if not np.isfinite(numbers).all():
            place = int(np.argmin(np.isfinite(numbers)))
            raise self._unusable(number, key, f"is {values[place]} for response {place}, which is no number")
        return numbers.tolist()

    def _logprobs(
        self, number: int, row: dict[str, Any], sequences: Sequence[list[int]], *, are_texts: bool
    ) -> Sequence[list[float] | None]:
        key = self._config.logprobs_key
        values = self._beside(number, row, key, len(sequences), is_expected=self.has_logprobs)
        if values is None:
            return [None] * len(sequences)
        if are_texts:
            raise self._unusable(
                number,
                key,
                f"has log-probs of tokens, but the responses are texts: give their token ids in "
                f"'{self._config.responses_key}', or leave the column out",
            )
        for place, (ids, logprobs) in enumerate(zip(sequences, values, strict=True)):
            found = 0 if logprobs is None else len(logprobs)
            if found != len(ids):
                raise self._unusable(number, key, f"has {found} numbers for the {len(ids)} tokens of response {place}")
            numbers = np.array(logprobs, dtype=np.float64)  # null becomes NaN
            bad = ~np.isfinite(numbers) | (numbers > LARGEST_LOGPROB)
            if bad.any():
                at = int(np.argmax(bad))
                raise self._unusable(
                    number, key, f"is {logprobs[at]} for token {at} of response {place}; a log-prob is a number up to 0"
                )
        return values

    def _beside(
        self, number: int, row: dict[str, Any], key: str, count: int, *, is_expected: bool
    ) -> Sequence[Any] | None:
        """The values of a column that all rows have, or none."""
        values = row[key]
        if (values is not None) != is_expected:
            here, there = ("is missing or null", "has it") if is_expected else ("is there", "does not have it")
            raise self._unusable(
                number,
                key,
                f"{here}, but row 0 of {self.files[0]} {there}: fill it in all rows of all files, or leave it out",
            )
        if values is not None and len(values) != count:
            raise self._unusable(number, key, f"has {len(values)} entries for {count} responses")
        return values

    def _unusable(self, number: int, key: str, reason: str) -> ConfigError:
        return ConfigError(f"{self._rows.where(number)}: column '{key}' {reason}.")


def _columns(config: DataConfig) -> list[Column]:
    return [
        Column(
            name=config.responses_key,
            accepts=lambda kind: (
                _is_list(kind, is_text) or _is_list(kind, lambda item: _is_list(item, pa.types.is_integer))
            ),
            expected="a list of responses: texts, or lists of token ids",
        ),
        Column(
            name=config.rewards_key,
            accepts=lambda kind: _is_list(kind, _is_number),
            expected="a list of numbers, one for each response",
            required=False,
        ),
        Column(
            name=config.logprobs_key,
            accepts=lambda kind: _is_list(kind, lambda item: _is_list(item, pa.types.is_floating)),
            expected="a list of lists of numbers, one for each token of each response",
            required=False,
        ),
    ]


def _is_list(kind: pa.DataType, accepts_item: Callable[[pa.DataType], bool]) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and accepts_item(kind.value_type)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)
