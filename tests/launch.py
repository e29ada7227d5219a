"""What tests that start programs share: time limits, ports, and torchrun with stacks where it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PATIENCE = 5.0
"""Time limits are those of an idle machine times this: tests/run.sh runs two files at once, CI on two cores."""

LIMIT_S = 900.0
"""For whatever a test waits for, where nothing else is said: it only ends a test that has failed."""

_PORTS = range(10_000, 20_000)
"""Below those of jobs (launch/slurm/job.sh), and of SGLang, and those that a system gives to whoever asks for any."""


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface for programs that are started next."""
    found: list[int] = []
    # Not the common generator, which code under test seeds: two tests at once would try the same ports.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"there are not {count} free ports")


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


def end_at_the_time_limit() -> None:
    """Of a test program: prints its stacks and exits shortly before whoever started it kills it."""
    faulthandler.dump_traceback_later(float(os.environ.get("MEGARL_TEST_TIMEOUT_S", LIMIT_S)), exit=True)


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
