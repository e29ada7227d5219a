"""What it costs a rank to say where it is: microseconds for each mark, and for each message to the others.

    python benchmarks/heartbeats.py

Marks are made in the main thread, at phases, micro-batches and collectives; messages are sent by a thread of its own,
to a TCPStore of this host, at most ten a second. Processor time of the calling thread; the best of several rounds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

import torch.distributed as dist

from megarl import platform
from megarl.observe.hang_watch import HangWatch
from megarl.observe.meeting import Meeting
from megarl.platform.progress import PROGRESS

ROUNDS = 5


def microseconds(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(repeats):
            action()
        times.append(time.thread_time() - start)
    return min(times) / repeats * 1e6


def phase() -> None:
    with PROGRESS.in_phase("update_actor"):
        pass


def collective() -> None:
    PROGRESS.begin_collective("all_reduce", None)
    PROGRESS.end_collective()


def main() -> None:
    platform.init_distributed()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    with tempfile.TemporaryDirectory() as folder:
        watch = HangWatch(Meeting(client, 0, 1), folder, timeout_s=600.0)
        figures = {
            "a phase": microseconds(phase, 10_000),
            "a micro-batch": microseconds(lambda: PROGRESS.begin_micro_batch(1, 2), 10_000),
            "a collective": microseconds(collective, 10_000),
            "a message": microseconds(watch._look, 200),
        }
    for name, figure in figures.items():
        print(f"{name}: {figure:.2f} µs")
    platform.shutdown_distributed()


if __name__ == "__main__":
    main()
