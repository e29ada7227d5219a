"""How likely the responses of pairs are to be preferred, where the files say so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from megarl.config.errors import ConfigError
from megarl.data.parquet import Column, ParquetRows, read_schema

WIN_RATE_KEYS = ("chosen_win_rate", "rejected_win_rate")
"""Columns that `preference.rounds` writes."""

_UNKNOWN = (1.0, 0.0)
"""Without these columns the chosen response wins always."""


def read_win_rates(files: Sequence[str]) -> np.ndarray:
    """The win rates of the chosen and of the rejected response of every row of all files, float32 [rows, 2].

    Raises:
        ConfigError: one that is no number from 0 to 1; a file with one of the two columns, or unlike the others.
    """
    columns = [Column(name=name, accepts=_is_number, expected="a number", required=False) for name in WIN_RATE_KEYS]
    rows = ParquetRows(files, columns)
    if not _has_win_rates(files):
        return np.tile(np.array(_UNKNOWN, dtype=np.float32), (len(rows), 1))
    rates = np.empty((len(rows), len(columns)), dtype=np.float32)
    for first, batch in rows.scan():
        for number, row in enumerate(batch, first):
            for side, name in enumerate(WIN_RATE_KEYS):
                rate = row[name]
                if rate is None:
                    raise ConfigError(f"{rows.where(number)}: column '{name}' is null, but must be from 0 to 1.")
                if not 0 <= rate <= 1:
                    raise ConfigError(f"{rows.where(number)}: column '{name}' is {rate}, but must be from 0 to 1.")
                rates[number, side] = rate
    return rates


def _has_win_rates(files: Sequence[str]) -> bool:
    """Whether the files have the two columns: all of them, or none."""
    found = [[name for name in WIN_RATE_KEYS if name in read_schema(file).names] for file in files]
    for file, names in zip(files, found, strict=True):
        if len(names) == 1:
            (missing,) = set(WIN_RATE_KEYS) - set(names)
            raise ConfigError(f"{file}: there is a column '{names[0]}' but no '{missing}': give both, or neither.")
        if names != found[0]:
            raise ConfigError(
                f"{file} and {files[0]} differ in the columns {', '.join(WIN_RATE_KEYS)}: give both to all."
            )
    return bool(found[0])


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)
