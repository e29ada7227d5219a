"""What goes wrong on one rank is raised on all, so that none waits for one that left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megarl.config.errors import ConfigError


def raise_together(problem: str | None) -> None:
    """Raises ConfigError on every rank if any rank has a problem; the message is the first such rank's.

    Collective over the world.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            raise ConfigError(text + found_by(rank))


def found_by(rank: int) -> str:
    """What a sentence ends with where there are several ranks."""
    return f" (found by rank {rank})" if dist.get_world_size() > 1 else ""


class SharedOutcome:
    """Collects what fails on this rank until `check` tells all ranks.

    Between a failure and the check a rank goes on taking part in collectives, and skips the work that failed.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """The first failure of this rank."""

    @contextlib.contextmanager
    def attempt(self, path: str | Path) -> Iterator[None]:
        """A block whose ConfigError or OSError is kept for `check`.

        Args:
            path: what the sentence names where the error does not know its file, as with a full disk.
        """
        try:
            yield
        except ConfigError as error:
            self.problem = self.problem or str(error)
        except OSError as error:
            self.problem = self.problem or file_problem(error, path)

    def check(self) -> None:
        """Raises ConfigError on every rank if any rank has failed. Collective over the world."""
        raise_together(self.problem)


def file_problem(error: OSError, path: str | Path) -> str:
    """One sentence about a file that could not be read or written."""
    return f"cannot read or write {error.filename or path}: {error.strerror or error}"
