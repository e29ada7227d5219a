"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class WholeFile:
    """A file to write, which appears under its name when it is finished and its contents are on the disk.

    Until then it has a name of its own, so that a process that should be dead cannot write into another one's file.
    """

    def __init__(self, path: str | Path) -> None:
        """Raises OSError where it cannot be made."""
        self._path = Path(path)
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        self.stream: BinaryIO = self._temporary.open("wb")

    def finish(self) -> None:
        """Raises OSError where it cannot be written."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        self._temporary.rename(self._path)

    def abandon(self) -> None:
        """Removes what was begun."""
        with contextlib.suppress(OSError):
            self.stream.close()  # a full disk: what is still in memory cannot be written either
        self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A `WholeFile` that is finished when the block ends well, and abandoned when it fails."""
    file = WholeFile(path)
    try:
        yield file.stream
        file.finish()
    except BaseException:
        file.abandon()
        raise


def sync(path: Path) -> None:
    """Brings a file's or folder's contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
