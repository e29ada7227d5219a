"""How likely the responses of pairs are to be preferred, where the files say so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from megarl.config.errors import ConfigError
from megarl.data.parquet import Column, ParquetRows

WIN_RATE_KEYS = ("chosen_win_rate", "rejected_win_rate")
"""Columns that `preference.rounds` writes."""

_UNKNOWN = (1.0, 0.0)
"""Without these columns the chosen response wins always."""


def read_win_rates(files: Sequence[str]) -> np.ndarray:
    """The win rates of the chosen and of the rejected response of every row of all files, float32 [rows, 2].

    Raises:
        ConfigError: one that is no number from 0 to 1.
    """
    columns = [Column(name=name, accepts=_is_number, expected="a number", required=False) for name in WIN_RATE_KEYS]
    rows = ParquetRows(files, columns)
    rates = np.empty((len(rows), len(columns)), dtype=np.float32)
    for first, batch in rows.scan():
        for number, row in enumerate(batch, first):
            for side, name in enumerate(WIN_RATE_KEYS):
                rate = _UNKNOWN[side] if row[name] is None else row[name]
                if not 0 <= rate <= 1:
                    raise ConfigError(f"{rows.where(number)}: column '{name}' is {rate}, but must be from 0 to 1.")
                rates[number, side] = rate
    return rates


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)
