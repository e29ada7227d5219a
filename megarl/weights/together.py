"""What goes wrong on one rank is raised on all, so that none waits for one that left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megarl.config.errors import ConfigError

Result = TypeVar("Result")


def raise_together(problem: str | None, kind: type[Exception] = ConfigError) -> None:
    """Raises `kind` on every rank if any rank has a problem; the message is the first such rank's.

    Collective over the world.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            raise kind(text + found_by(rank))


def on_first_rank(action: Callable[[], Result]) -> Result:
    """What rank 0 gets by an action on files, on every rank. Collective over the world.

    Raises:
        ConfigError: on every rank; it failed with a ConfigError or an OSError.
    """
    done: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            done[0] = action()
        except ConfigError as error:
            done[1] = error.problems
        except OSError as error:
            done[1] = f"{file_problem(error, 'a file')}."
    dist.broadcast_object_list(done)
    if done[1] is not None:
        raise ConfigError(done[1])
    return done[0]


def found_by(rank: int) -> str:
    """What a sentence ends with where there are several ranks."""
    return f" (found by rank {rank})" if dist.get_world_size() > 1 else ""


class SharedOutcome:
    """Collects what fails on this rank until `check` tells all ranks.

    Between a failure and the check a rank goes on taking part in collectives, and skips the work that failed.
    """

    def __init__(self, kind: type[Exception] = ConfigError) -> None:
        """Args:
        kind: what `check` raises.
        """
        self._kind = kind
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

    @contextlib.contextmanager
    def attempt_any(self, doing: str) -> Iterator[None]:
        """A block whose every error is kept for `check`: of code that is not ours, which may raise anything.

        Args:
            doing: what the sentence begins with.
        """
        try:
            yield
        except Exception as error:
            self.problem = self.problem or f"{doing}: {error or type(error).__name__}"

    def check(self) -> None:
        """Raises on every rank if any rank has failed. Collective over the world."""
        raise_together(self.problem, self._kind)


def file_problem(error: OSError, path: str | Path) -> str:
    """One sentence about a file that could not be read or written."""
    # An error between two files, such as a copy onto a full disk, is about the second.
    return f"cannot read or write {error.filename2 or error.filename or path}: {error.strerror or error}"
