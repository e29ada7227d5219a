"""What happens to rows that are too long: one rule for prompts and for conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.config.errors import ConfigError
from megarl.config.schema_inputs import DataConfig
from megarl.data.fingerprint import Fingerprint
from megarl.data.parquet import ParquetRows

Progress = Callable[[str], None]
"""Is told, in a sentence, how far a long task has come."""

_PROGRESS_ROWS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRule:
    """How many tokens a row may have, and what happens to a longer one."""

    max_tokens: int
    truncation: str
    """`data.truncation`: filter, truncate_left or error."""
    keys: str
    """The config keys that set `max_tokens`, for errors."""

    @classmethod
    def of_conversations(cls, config: DataConfig) -> LengthRule:
        """That of rows which hold prompt and response together."""
        return cls(
            max_tokens=config.max_prompt_length + config.max_response_length,
            truncation=config.truncation,
            keys="data.max_prompt_length + data.max_response_length",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UsableRows:
    """The rows that a length rule leaves."""

    rows: np.ndarray
    """int64 [usable]: their numbers over all files."""
    lengths: np.ndarray
    """int32 [usable]: tokens, after cutting."""
    num_rows: int
    """Rows in the files."""
    num_cut: int
    """Rows that are cut at their beginning."""
    fingerprint: str
    """Of all rows in the files, those that are left out too."""
    rule: LengthRule

    def __len__(self) -> int:
        return len(self.rows)

    def description(self) -> str:
        """What is used and what is not, in one sentence."""
        parts = [f"{len(self):,} of {self.num_rows:,} rows are used"]
        if left_out := self.num_rows - len(self):
            parts.append(f"{left_out:,} left out, longer than {self.rule.keys} = {self.rule.max_tokens} tokens")
        if self.num_cut:
            parts.append(f"{self.num_cut:,} cut at their beginning to {self.rule.keys} = {self.rule.max_tokens} tokens")
        parts.append(f"tokens {self.lengths.min()} to {self.lengths.max()}, mean {self.lengths.mean():.1f}")
        return "; ".join(parts)


def usable_rows(
    rows: ParquetRows,
    count_tokens: Callable[[int, list[dict[str, Any]]], list[int]],
    rule: LengthRule,
    progress: Progress | None = None,
) -> UsableRows:
    """Counts the tokens of every row once, and applies the rule. Holds numbers only, not the rows.

    Args:
        count_tokens: from (number of the first row, rows) to their tokens.
        progress: told every 10,000 rows.

    Raises:
        ConfigError: what `count_tokens` raises; the first longer row where the rule is `error`; no row left.
    """
    parts = []
    done = 0
    fingerprint = Fingerprint()
    for first, batch in rows.scan():
        fingerprint.add(batch)
        parts.append(np.array(count_tokens(first, batch), dtype=np.int32))
        if rule.truncation == "error":
            _refuse_longer(rows, first, parts[-1], rule)
        done, before = first + len(batch), done
        if progress and done // _PROGRESS_ROWS > before // _PROGRESS_ROWS:
            progress(f"counted the tokens of {done:,} of {len(rows):,} rows")
    lengths = np.concatenate(parts)
    longer = lengths > rule.max_tokens
    keep = ~longer if rule.truncation == "filter" else np.ones(len(rows), dtype=bool)
    if not keep.any():
        raise ConfigError(
            f"{', '.join(rows.files)}: all {len(rows)} rows are longer than {rule.keys} = {rule.max_tokens} tokens "
            f"(the shortest has {lengths.min()}): raise it, or set data.truncation to truncate_left."
        )
    return UsableRows(
        rows=np.flatnonzero(keep),
        lengths=np.minimum(lengths[keep], rule.max_tokens),
        num_rows=len(rows),
        num_cut=int(longer[keep].sum()),
        fingerprint=fingerprint.hexdigest(),
        rule=rule,
    )


def _refuse_longer(rows: ParquetRows, first: int, lengths: np.ndarray, rule: LengthRule) -> None:
    for offset in np.flatnonzero(lengths > rule.max_tokens).tolist():
        raise ConfigError(
            f"{rows.where(first + offset)} has {lengths[offset]} tokens, more than {rule.keys} = {rule.max_tokens}: "
            "raise it, or set data.truncation to filter or truncate_left."
        )
