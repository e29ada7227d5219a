"""What a process says before it ends in the middle of things, to people and to torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import NoReturn

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun names a file of each rank in it, and shows what is in that of the rank that failed first."""


def leave(status: int, text: str, summary: str | None = None) -> NoReturn:
    """Prints `text` and ends the process without tearing anything down, which might wait for ranks that never come.

    Args:
        status: the exit status.
        text: for stderr.
        summary: what torchrun shows of it; `text` if not given.
    """
    _tell_torchrun(text if summary is None else summary)
    # In one write each: the lines of several ranks would mix otherwise. Nothing may keep a process that has to end.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    os._exit(status)


def _tell_torchrun(message: str) -> None:
    """In the format of torch.distributed.elastic's ErrorHandler, whose own would add a traceback."""
    file = os.environ.get(_ERROR_FILE)
    if not file:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as stream:
        json.dump({"message": {"message": message, "extraInfo": details}}, stream)
