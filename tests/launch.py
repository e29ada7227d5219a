"""Starts a test program under torchrun, with a time limit and stacks where it hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PATIENCE = 3.0
"""Time limits are those of an idle machine times this: tests/run.sh runs two files at once, CI on two cores."""


def environment(timeout: float = 240.0) -> dict[str, str]:
    """Of a test program."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(ROOT),
        "MEGARL_TEST_TIMEOUT_S": str(timeout * 0.9),
        "CUDA_VISIBLE_DEVICES": "",
    }


def torchrun(
    ranks: int, program: str, *arguments: object, timeout: float = 240.0, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs `program` (a path from the repository's root) on `ranks` ranks.

    Raises:
        AssertionError: it failed (with what it printed), if `check`.
        subprocess.TimeoutExpired: it did not end in `timeout` · `PATIENCE` seconds; ranks print their stacks shortly
            before.
    """
    timeout *= PATIENCE
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    result = subprocess.run(
        [*command, str(ROOT / program), *map(str, arguments)],
        env=environment(timeout),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
        assert result.returncode == 0, f"{program} failed:\n{result.stdout[-4000:]}\n{result.stderr[-8000:]}"
    return result
