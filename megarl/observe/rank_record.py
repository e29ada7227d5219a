"""What a rank tells the others about itself: who it is and how far it has come."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from megarl.platform.progress import PROGRESS, Wait
from megarl.processes.identity import start_of

_OF_THE_WATCH = "megarl-"
"""What the names of threads that say nothing begin with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """One rank at one moment."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started: str | None = None
    """Of the process, to tell it from a later one with its number (`start_of`)."""
    time: float
    """Seconds since 1970, by the clock of its host."""
    step: int | None
    phase: str | None
    micro_batch: tuple[int, int] | None
    collective: str | None
    """The latest, whether or not it has returned."""
    group: tuple[int, ...] = ()
    """Ranks of that."""
    waited_s: float | None = None
    """How long it has been in it; None where it is not."""

    def place(self) -> str:
        """E.g. `update_actor of step 3, micro-batch 2 of 4`."""
        step = "no step yet" if self.step is None else f"step {self.step}"
        place = f"{self.phase} of {step}" if self.phase else step
        if self.micro_batch is not None:
            place += f", micro-batch {self.micro_batch[0]} of {self.micro_batch[1]}"
        return place

    def call(self) -> str:
        """E.g. `all_reduce of ranks 0-3`."""
        return f"{self.collective} of {name_ranks(self.group)}" if self.group else str(self.collective)

    def clock(self) -> str:
        """When this was, e.g. `14:03:22`."""
        return time.strftime("%H:%M:%S", time.localtime(self.time))

    def process(self) -> str:
        """E.g. `rank 1 (process 4711 on node-07)`."""
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def is_alive_here(self) -> bool | None:
        """Whether its process runs; None where it is on another host."""
        if self.host != socket.gethostname():
            return None
        return self.started is not None and start_of(self.pid) == self.started

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankRecord:
        values = json.loads(text)
        values["group"] = tuple(values["group"])
        values["micro_batch"] = None if values["micro_batch"] is None else tuple(values["micro_batch"])
        return cls(**values)


def record_of_this_process(rank: int, started: str | None, wait: Wait | None) -> RankRecord:
    """The record as of now.

    Args:
        started: `start_of` this process.
        wait: the collective that it waits in, if any.
    """
    collective = PROGRESS.collective if wait is None else wait.collective
    group: tuple[int, ...] = ()
    if collective is not None:
        with contextlib.suppress(ValueError, RuntimeError, TypeError):  # the group has been destroyed since
            group = tuple(dist.get_process_group_ranks(collective.group or dist.group.WORLD))
    return RankRecord(
        rank=rank,
        started=started,
        time=time.time(),
        step=PROGRESS.step,
        phase=PROGRESS.phase,
        micro_batch=PROGRESS.micro_batch,
        collective=None if collective is None else collective.name,
        group=group,
        waited_s=None if wait is None else wait.seconds,
    )


def stacks_of_this_process() -> str:
    """Where the threads of this process are, the main thread first; those of its own machinery are left out."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is None or thread.name.startswith(_OF_THE_WATCH):
            continue
        parts.append(f"thread {thread.name}:\n" + "".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(parts)


def name_ranks(ranks: Sequence[int]) -> str:
    """E.g. `rank 3` or `ranks 0-5, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    names = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
