"""One run at a time in a folder. Imports no torch.

`run.lock` says who writes there: host, process, and the job it belongs to. While the run lives, its process also holds
a POSIX lock on the file, which the system takes away when the process ends however it ends, and which children do not
inherit. On file systems that share these locks between hosts (NFS, Lustre with `flock`) a second run elsewhere is
noticed by the lock; on others by what the file says.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.processes.identity import start_of

LOCK_NAME = "run.lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
"""What names a job, and stays the same when it is requeued or its ranks are restarted."""
_NO_JOB = ("", "none")


class RunLock:
    """The right to write into a run's folder, from `acquire` to `release` or the end of the process."""

    def __init__(self, folder: str | Path) -> None:
        self._file = Path(folder, LOCK_NAME)
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Takes the lock; returns a sentence where it was left behind by a run that is over.

        Raises:
            ConfigError: another run has it, or the folder cannot be written.
        """
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir {self._file.parent} cannot be written ({error.strerror}): choose a folder "
                "that can."
            ) from None
        owner: dict[str, Any] = {}
        try:
            is_locked = _lock(descriptor)
            owner = _read(descriptor)
            if problem := self._problem(owner, is_locked):
                raise ConfigError(problem)
            _write(descriptor, _self())
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"{self._file} cannot be written: {error.strerror}.") from None
        except ConfigError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        if not owner:
            return None
        return f"took {self._file} over from {_name(owner)}, which ended without giving it back"

    def release(self) -> None:
        """Gives the lock back."""
        if self._descriptor is not None:
            # Emptied, not removed: between removing and closing, a second run could lock a file that no third sees.
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _problem(self, owner: Mapping[str, Any], is_locked: bool | None) -> str | None:
        """Why the folder is another run's, if it is.

        Args:
            is_locked: whether this process has the POSIX lock now; None: the file system has none.
        """
        other = _name(owner) if owner else "another run"
        in_use = (
            f"trainer.default_local_dir {self._file.parent} is in use by {other}: wait for its end, or name another "
            "folder."
        )
        if is_locked is False:
            return in_use
        if not owner or _same_job(owner):
            return None
        if owner.get("host") != socket.gethostname():
            return (
                f"trainer.default_local_dir {self._file.parent} is in use by {other}, which cannot be looked at from "
                f"here: if that run is over, remove {self._file}; if not, name another folder."
            )
        return in_use if is_locked is None and _is_alive(owner) else None


def _lock(descriptor: int) -> bool | None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return False if error.errno in _HELD else None


def _read(descriptor: int) -> dict[str, Any]:
    """Who the file names; empty where nobody, or where it was not written to its end."""
    with contextlib.suppress(ValueError):
        content = json.loads(os.pread(descriptor, 1 << 16, 0))
        if isinstance(content, dict):
            return content
    return {}


def _write(descriptor: int, owner: Mapping[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(owner) + "\n").encode(), 0)
    os.fsync(descriptor)


def _self() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": start_of(os.getpid()),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "job": _job(),
    }


def _job() -> str | None:
    for name in _JOB_VARIABLES:
        if os.environ.get(name, "") not in _NO_JOB:
            return f"{name}={os.environ[name]}"
    return None


def _same_job(owner: Mapping[str, Any]) -> bool:
    """Whether it is an earlier start of this very job, which the scheduler has ended."""
    return owner.get("job") is not None and owner["job"] == _job()


def _is_alive(owner: Mapping[str, Any]) -> bool:
    return owner.get("started") is not None and start_of(owner.get("pid", 0)) == owner["started"]


def _name(owner: Mapping[str, Any]) -> str:
    return f"a run on {owner.get('host')} (process {owner.get('pid')}, since {owner.get('since')})"
