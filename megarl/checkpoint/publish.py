"""A folder that appears under its final name when it is complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.target import check_target
from megarl.config.errors import ConfigError
from megarl.weights.files import sync
from megarl.weights.together import SharedOutcome


@contextlib.contextmanager
def publish(target: str | Path) -> Iterator[Path]:
    """Gives a temporary folder beside `target`, and renames it to `target` when the block ends well.

    Collective over the world, on a file system that all ranks share. The block must fail on all ranks or on none; a
    failure on any rank removes the folder. Files are synced to the disk before the rename, since a rename can survive a
    crash that the files' contents do not.

    Yields:
        `.<name>.partial-<random>`, an empty folder. A killed process leaves it behind; it is safe to delete.

    Raises:
        ConfigError: on every rank; the target exists, or it cannot be written.
    """
    target = Path(target)
    temporary = _make_temporary(target)
    try:
        outcome = SharedOutcome()
        with outcome.attempt(temporary):
            check_shared(temporary)
        outcome.check()
        yield temporary
        dist.barrier()
        with outcome.attempt(target):
            if dist.get_rank() == 0:
                sync_tree(temporary)
                temporary.rename(target)
                sync(target.parent)
        outcome.check()
    except BaseException as error:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, ConfigError):
            # The person knows the final name only.
            problems = [problem.replace(str(temporary), str(target)) for problem in error.problems]
            raise ConfigError(problems) from None
        raise


def check_shared(folder: Path) -> None:
    """Refuses a folder that rank 0 has made and this rank does not see.

    Raises:
        ConfigError: it is on a file system that the ranks do not share.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"rank {dist.get_rank()} does not see {folder}, which rank 0 made; choose a folder on a file system that "
            "all ranks share"
        )


def _make_temporary(target: Path) -> Path:
    outcome = SharedOutcome()
    path: list[str | None] = [None]
    with outcome.attempt(target):
        if dist.get_rank() == 0:
            check_target(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
            temporary.mkdir()
            path = [str(temporary)]
    outcome.check()
    dist.broadcast_object_list(path, src=0)
    return Path(str(path[0]))


def sync_tree(folder: Path) -> None:
    """Brings a folder with all that is in it to the disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))
