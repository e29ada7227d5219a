"""An engine's server process, as its rank sees it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from megarl.rollout.engine import EngineDied
from megarl.rollout.sglang.channel import STARTED, Channel

_SERVER = "megarl.rollout.sglang.server"
_LINES_SHOWN = 12
"""Of what the process last wrote, in an error."""
_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception): ")
"""The last line of a traceback."""
_NOISE = re.compile(r"py-?spy|coredump", re.IGNORECASE)
"""What SGLang writes while it dies about tools that it looks for."""
_END_TIMEOUT_S = 20.0


class EngineProcess(Channel):
    """Starts a server process and talks to it."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Returns at once; `wait_until_ready` waits for the engine.

        Args:
            arguments: of SGLang's `Engine`; they are sent as JSON.
            environment: that the process starts in, complete.
        """
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (closed with the process)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(os.getpid()), str(theirs.fileno()), json.dumps(arguments)],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is the rank's to answer; with it in the same process group, SGLang would print its stacks.
                start_new_session=True,
            )
        super().__init__(Connection(ours.detach()))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> str | None:
        """Waits for the engine; what kept it from starting, if anything did."""
        try:
            return self.answer(STARTED)
        except EngineDied as error:
            # Most often an argument that SGLang cannot use: then its last error says all.
            errors = [line for line in self._lines() if _ERROR.match(line)]
            return errors[-1].strip() if errors else str(error)

    def close(self) -> None:
        """Ends the process and those that it started."""
        super().close()
        # The closed connection is its sign to end in good order.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_TIMEOUT_S)
        self._kill()
        self._log.close()

    def _lost(self) -> EngineDied:
        # The connection closes a moment before the process ends, and its log may be written to until then.
        deadline = time.monotonic() + _END_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        code = self._process.poll()
        self._kill()
        match code:
            case None:
                how = "its server process closed the connection without ending"
            case code if code < 0:
                how = f"its server process was ended by {signal.Signals(-code).name}"
            case _:
                how = f"its server process ended with status {code}"
        return EngineDied(f"{how}{self._last_lines()}")

    def _kill(self) -> None:
        """Ends what is left: the process is the leader of its session, so its process group is all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _lines(self) -> list[str]:
        """What the process has written."""
        if self._log.closed:
            return []
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip() and not _NOISE.search(line)]

    def _last_lines(self) -> str:
        shown = "\n  ".join(self._lines()[-_LINES_SHOWN:])
        return f"; it last wrote:\n  {shown}" if shown else "; it wrote nothing"
