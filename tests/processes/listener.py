"""Program: listens to stop signals and says what it notes. Usage: listener.py GRACE_S [same-request seconds | start].

With `start` it is a run that has not begun its steps. It prints `listening` with the process id of a program that it
has started, `noted SIGNAL` for each signal, and `SIGNAL` with the status of that program when it is asked anything new.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from megarl.processes import stop_signals
from megarl.processes.parent import die_with_parent


def main() -> None:
    is_starting = sys.argv[2:] == ["start"]
    if len(sys.argv) > 2 and not is_starting:
        stop_signals.SAME_REQUEST_S = float(sys.argv[2])
    tell_of_every_signal()
    stop_signals.listen(float(sys.argv[1]))
    if not is_starting:
        stop_signals.begin_steps()
    # As in real life, but for the pipes, which would stay open after this process.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(["sleep", "3600"], **quiet, preexec_fn=die_with_parent)
    print("listening", child.pid, flush=True)
    seen = None
    while True:
        # In one long call of C code, as in a collective: Python's own handlers would not run before it returns.
        sum(range(20_000_000)) if stop_signals.stop_request() is None else time.sleep(0.05)
        if stop_signals.stop_request() is not seen:
            seen = stop_signals.stop_request()
            print(seen.name, child.poll(), flush=True)


def tell_of_every_signal() -> None:
    receive = stop_signals.StopSignals._receive

    def receive_and_tell(self: stop_signals.StopSignals, number: signal.Signals) -> None:
        receive(self, number)
        os.write(1, f"noted {number.name}\n".encode())  # in one piece, whatever another thread prints

    stop_signals.StopSignals._receive = receive_and_tell  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
