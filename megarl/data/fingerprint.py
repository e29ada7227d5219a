"""What tells the rows of one dataset from those of another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any


class Fingerprint:
    """A checksum over rows in their order, as they are read.

    The same rows give the same one however they are divided into files and row groups. A row of a kilobyte takes some
    7 µs of one core, below 1 % of what reading it and counting its tokens takes.
    """

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, rows: Iterable[Any]) -> None:
        """Adds the next rows: dicts, lists, texts, numbers, dates, whatever parquet files hold."""
        for row in rows:
            self._sum.update(repr(row).encode())
            self._sum.update(b"\n")  # which is no part of what `repr` gives: rows cannot run into one another

    def hexdigest(self) -> str:
        """That of the rows so far."""
        return self._sum.hexdigest()
