"""Starts `launch/engine.py` as a person does, and ends it with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.launch import LIMIT_S, ROOT, environment, free_ports


def free_port() -> int:
    (port,) = free_ports(1)
    return port


class EngineServer:
    """A running server."""

    def __init__(self, config: Path, *overrides: str) -> None:
        """Returns at once; `wait_until` waits."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in `end`)
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "launch/engine.py"), "--config", str(config), *overrides],
            env=environment(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait_until(self, said: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while said not in self.output():
            assert self.process.poll() is None, f"the server ended with {self.process.poll()}:\n{self.output()[-4000:]}"
            assert time.monotonic() < deadline, f"the server did not say {said!r}:\n{self.output()[-4000:]}"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def schedulers(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "sglang::" in " ".join(process.cmdline())]

    def end(self) -> None:
        """Kills what still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


@contextlib.contextmanager
def engine_server(config: Path, *overrides: str) -> Iterator[EngineServer]:
    server = EngineServer(config, *overrides)
    try:
        yield server
    finally:
        server.end()
