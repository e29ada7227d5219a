"""torchrun that ends with the status of its ranks: `agent.py [options of torchrun] PROGRAM …`.

torchrun itself has status 1 and a traceback for all of them. A job has to tell a stop on request (75), after which the
run goes on later, and a bad config (2), which does not get better, from what may be worth another try. A signal it
passes on to its ranks, and waits for them; SIGUSR1 it does not even handle unless it is told to. And where the nodes do
not find one another, it says no more than `RendezvousTimeoutError`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import FrameType

from megarl.processes.stop_signals import EXIT_PREEMPTED

EXIT_FAILED = 1
EXIT_KILLED = 128
"""A signal ended a rank."""

HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def main() -> int:
    """Runs torchrun; returns 75 if a signal ended it, or the status of the rank that failed first."""
    # Until torchrun has ranks, and handlers of its own, there is nothing to wait for.
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, _leave)
    from torch.distributed.elastic.multiprocessing.api import SignalException  # here, since torch takes seconds
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--signals-to-handle", HANDLED, *sys.argv[1:]])
    except SignalException:
        return EXIT_PREEMPTED
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else EXIT_KILLED  # it is -9 where SIGKILL ended the rank
    except RendezvousTimeoutError:
        _say(
            "not all nodes of the job have come in time (torchrun's join_timeout); see above what became of the others"
        )
        return EXIT_FAILED
    except RendezvousConnectionError:
        _say(
            "it is not reached from here: the first node has ended (see above), or is to be reached at another address "
            "(MASTER_ADDR, MASTER_PORT)"
        )
        return EXIT_FAILED
    return 0


def _say(reason: str) -> None:
    place = os.environ.get("RENDEZVOUS", "the rendezvous")  # of node.sh
    print(f"node {socket.gethostname()}: the nodes were to meet at {place}, but {reason}", file=sys.stderr)


def _leave(number: int, frame: FrameType | None) -> None:
    # Not sys.exit: its exception is swallowed where the signal interrupts a callback, as the import system has them.
    os._exit(EXIT_PREEMPTED)


if __name__ == "__main__":
    sys.exit(main())
