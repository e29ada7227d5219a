"""What makes a conversion the same as one that was killed, and what is said about it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist
from common import say

import megarl
from megarl.platform.usage import peak_memory_bytes
from megarl.weights.journal import Journal


def identity(source: Path, files: Iterable[Path], **settings: object) -> dict[str, object]:
    """What has to be the same for a conversion to go on where another one was killed.

    Args:
        files: of the source, which are told apart by name, size and time of change.
        settings: everything else that decides what is written.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        status = file.stat()
        digest.update(f"{file.relative_to(source)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return {
        "source": str(source.absolute()),
        "the state of its files": digest.hexdigest()[:12],
        "megarl": megarl.__version__,
        **settings,
    }


def say_what_is_there(journal: Journal) -> None:
    """Tells of the files that an earlier run left."""
    if journal.finished:
        size = sum(record["size"] for record in journal.finished.values())
        say(f"goes on with {len(journal.finished)} finished files ({size / 1e6:,.1f} MB) of an earlier run")
    for name in journal.damaged:
        say(f"{name} was finished by an earlier run, but has changed since; it is written again")


class Summary:
    """The line at the end: how fast, how much by each rank, and the memory it took."""

    def __init__(self, title: str) -> None:
        """Starts the clock."""
        self._title, self._start = title, time.monotonic()

    def say(self, written_bytes: int) -> None:
        """Collective over the world.

        Args:
            written_bytes: by this rank.
        """
        seconds = time.monotonic() - self._start
        ranks: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(ranks, (written_bytes, peak_memory_bytes()))
        written = [rank[0] for rank in ranks]
        peak, rank = max((memory, rank) for rank, (_, memory) in enumerate(ranks))
        say(
            f"{self._title}: {sum(written) / 1e6:,.1f} MB written in {seconds:.1f} s, "
            f"{sum(written) / 1e6 / seconds:,.1f} MB/s; by each rank {min(written) / 1e6:,.1f} to "
            f"{max(written) / 1e6:,.1f} MB; peak memory {peak / 1e6:,.0f} MB, on rank {rank}"
        )
