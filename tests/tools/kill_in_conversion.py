"""Runs a converter that is killed: each rank ends itself when it has written a file and has not noted it yet.

    python tests/tools/kill_in_conversion.py NUMBER TOOL [ARGUMENTS OF THE TOOL]

NUMBER counts the rank's files from 1.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from megarl.weights.journal import Journal


def main() -> None:
    number, tool = int(sys.argv[1]), Path(sys.argv[2])
    record = Journal.record
    written: list[Path] = []

    def record_or_die(self: Journal, path: Path, **more: Any) -> None:
        written.append(path)
        if len(written) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        record(self, path, **more)

    Journal.record = record_or_die  # type: ignore[method-assign]
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(tool.parent))  # as Python does for a script
    runpy.run_path(str(tool), run_name="__main__")


if __name__ == "__main__":
    main()
