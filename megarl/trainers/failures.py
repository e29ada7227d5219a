"""How a rank fails: what it says, to people, to torchrun and to the other ranks, and with which status it ends."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from typing import NoReturn

import torch.distributed as dist

from megarl import platform
from megarl.config import ConfigError, RunConfig
from megarl.observe.failure import place_of
from megarl.observe.hang_watch import EXIT_FAILED, UNKNOWN_REASON, HangWatch
from megarl.observe.meeting import Meeting
from megarl.observe.out_of_memory import is_out_of_memory, report_out_of_memory
from megarl.platform.progress import PROGRESS
from megarl.processes.last_words import leave
from megarl.rollout.engine import EngineDied, WeightUpdateError

EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130
"""What shells give for a program that SIGINT (Ctrl-C) ended."""


class Failures:
    """The failures of one rank, and its watch over the others."""

    def __init__(self, config: RunConfig) -> None:
        # Of the environment, since joining the others may fail too.
        self.rank = int(os.environ.get("RANK", "0"))
        self._config = config
        self._watch: HangWatch | None = None

    def watch(self, timeout_s: float) -> None:
        """Begins to look for ranks that are missing; one rank alone waits for nobody. Collective over the world.

        Args:
            timeout_s: how long a collective may wait, in seconds.
        """
        if dist.get_world_size() == 1:
            return
        meeting = Meeting.of_this_run()
        if meeting is not None:
            self._watch = HangWatch(meeting, self._config.trainer.default_local_dir, timeout_s)
            self._watch.start()

    def close(self) -> None:
        """Ends the watch."""
        if self._watch is not None:
            self._watch.close()

    def leave_because_of(self, error: BaseException) -> NoReturn:
        """Says what happened, and ends the process at once: it must not wait for ranks that may never come."""
        self.close()
        known = place_of(error)
        # Evaluations and checkpoints follow their step, of which the exception then knows nothing.
        place = replace(known, step=PROGRESS.step if known.step is None else known.step).describe()
        if PROGRESS.micro_batch is not None:
            place += ", micro-batch {} of {}".format(*PROGRESS.micro_batch)
        if isinstance(error, ConfigError):
            self._leave(EXIT_BAD_CONFIG, str(error))
        if isinstance(error, (EngineDied, WeightUpdateError)):  # which say all that is known of an engine
            self._leave(EXIT_FAILED, f"failed{place}: {error}")
        if isinstance(error, KeyboardInterrupt):
            self._leave(EXIT_INTERRUPTED, "interrupted")
        if is_out_of_memory(error):
            self._leave(EXIT_FAILED, report_out_of_memory(error, self._config, self.rank))
        if isinstance(error, platform.RanksMissingError):
            self._leave(EXIT_FAILED, str(error))
        if platform.is_peer_failure(error):
            reason = self._why_a_peer_left()
            self._leave(EXIT_FAILED, f"ends{place}, since {reason}", reason=reason)
        summary = f"failed{place} ({type(error).__name__}: {error})"
        self._leave(EXIT_FAILED, summary, f"failed{place}:\n{''.join(traceback.format_exception(error))}")

    def _leave(self, status: int, sentence: str, text: str | None = None, reason: str | None = None) -> NoReturn:
        """Args:
        sentence: about this rank.
        text: what people get instead of it.
        reason: what other ranks get, where it is not this rank's own.
        """
        if self._watch is not None:
            self._watch.declare_failure(f"rank {self.rank}: {sentence}" if reason is None else reason)
        leave(status, f"rank {self.rank}: {sentence if text is None else text}", sentence)

    def _why_a_peer_left(self) -> str:
        if self._watch is None:
            return UNKNOWN_REASON
        first = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
        return self._watch.why_a_peer_left(range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
