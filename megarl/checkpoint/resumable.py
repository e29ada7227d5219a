"""A folder that appears under its final name when it is complete, and that a killed program can go on with.

.<name>.partial/
  identity.json   what is being written, from what and how
  lock            held while somebody writes
  journal/        a record of each finished file (`weights.journal`)
  content/        what becomes the folder
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.checkpoint.publish import check_shared, sync_tree
from megarl.checkpoint.target import check_target
from megarl.config.errors import ConfigError
from megarl.weights.files import sync, whole_file
from megarl.weights.journal import Journal
from megarl.weights.together import SharedOutcome

_IDENTITY, _LOCK, _JOURNAL, _CONTENT = "identity.json", "lock", "journal", "content"


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A folder on its way."""

    folder: Path
    """What the block fills."""
    journal: Journal


@contextlib.contextmanager
def publish_resumable(target: str | Path, identity: Mapping[str, Any]) -> Iterator[Unfinished]:
    """Gives a folder beside `target`, with what an earlier run finished of it, and renames it when the block ends well.

    Collective over the world, on a file system that all ranks share. The block must fail on all ranks or on none. Where
    it fails or is killed, what is recorded as finished stays for the next run with the same identity.

    Args:
        identity: what makes two runs write the same files, by names that a person understands; JSON; rank 0's counts.

    Raises:
        ConfigError: on every rank; the target exists or cannot be written, another run is at it, or what an earlier run
            left is of another identity.
    """
    target = Path(target)
    partial = target.parent / f".{target.name}.partial"
    outcome = SharedOutcome()
    with contextlib.ExitStack() as held:
        with outcome.attempt(target):
            if dist.get_rank() == 0:
                check_target(target)
                partial.mkdir(parents=True, exist_ok=True)
                held.enter_context(_lock(partial, target))
                _prepare(partial, identity)
        outcome.check()
        content = partial / _CONTENT
        try:
            with outcome.attempt(partial):
                check_shared(content)
            outcome.check()
            journal = Journal(content, partial / _JOURNAL)
            with outcome.attempt(content):
                if dist.get_rank() == 0:
                    _remove_unfinished(content, journal)
            outcome.check()
            yield Unfinished(content, journal)
            dist.barrier()
            with outcome.attempt(target):
                if dist.get_rank() == 0:
                    sync_tree(content)
                    content.rename(target)
                    sync(target.parent)
                    shutil.rmtree(partial, ignore_errors=True)
            outcome.check()
        except BaseException as error:
            is_kept = _keep_or_remove(partial)
            if not isinstance(error, ConfigError):
                raise
            # The person knows the final name only.
            problems = [problem.replace(str(content), str(target)) for problem in error.problems]
            if is_kept:
                problems[-1] += f"; {partial} keeps what is finished: run the same command again to go on, or delete it"
            raise ConfigError(problems) from None


@contextlib.contextmanager
def _lock(partial: Path, target: Path) -> Iterator[None]:
    """Holds the folder's lock, which the system lifts when the process ends, however it ends."""
    descriptor = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another conversion is writing {target}; wait for it, or choose another --out") from None
        # Between the looks at the target and at the lock, the other conversion may have finished.
        check_target(target)
        if not (partial / _LOCK).exists():
            raise ConfigError(f"another conversion to {target} has just ended; start this one again")
        yield
    finally:
        os.close(descriptor)


def _prepare(partial: Path, identity: Mapping[str, Any]) -> None:
    """Makes the folders, or sees that those there are of the same identity."""
    wanted = json.loads(json.dumps(identity))
    file = partial / _IDENTITY
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        if other := [key for key in wanted | found if wanted.get(key) != found.get(key)]:
            differences = ", ".join(f"{key} was {found.get(key)} and is {wanted.get(key)}" for key in other)
            raise ConfigError(
                f"{partial} holds an unfinished conversion of another kind: {differences}; finish it as it was begun, "
                "or delete that folder to start anew"
            )
    for name in (_JOURNAL, _CONTENT):
        (partial / name).mkdir(exist_ok=True)
    with whole_file(file) as stream:
        stream.write(json.dumps(wanted, indent=2).encode())


def _remove_unfinished(content: Path, journal: Journal) -> None:
    """Leaves the finished files alone, and the folders that they are in."""
    for parent, _, names in os.walk(content):
        for path in (Path(parent, name) for name in names):
            if journal.name_of(path) not in journal.finished:
                path.unlink()


def _keep_or_remove(partial: Path) -> bool:
    """Removes the folder on rank 0, if nothing in it is finished; returns there whether it stays."""
    if dist.get_rank() != 0:
        return False
    is_kept = any((partial / _JOURNAL).glob("*.json"))
    if not is_kept:
        shutil.rmtree(partial, ignore_errors=True)
    return is_kept
