"""Rows that were tokenised once, kept for the next time they are drawn."""

from __future__ import annotations

import numpy as np

KEPT_TOKENS = 50_000_000
"""What one dataset keeps in memory: a quarter of a gigabyte. Rows beyond are tokenised at every draw."""

Encoded = tuple[list[int], list[int]]
"""Token ids of a conversation, and 1 for each that is learned, 0 elsewhere."""


class EncodedRows:
    """Encoded conversations by a key, as many as fit; the first ones that come stay."""

    def __init__(self, limit: int = KEPT_TOKENS) -> None:
        """Args:
        limit: tokens of all that is kept.
        """
        self._limit = limit
        self._tokens = 0
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._kept

    def __getitem__(self, key: int) -> Encoded:
        ids, mask = self._kept[key]
        return ids.tolist(), mask.tolist()

    def add(self, key: int, encoded: Encoded) -> None:
        """Keeps it, if there is room and it is not kept already."""
        ids, mask = encoded
        if key not in self._kept and self._tokens + len(ids) <= self._limit:
            self._kept[key] = (np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8))
            self._tokens += len(ids)
