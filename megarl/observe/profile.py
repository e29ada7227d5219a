"""Traces of torch's profiler for chosen steps and ranks (`observe.profile`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.config import RunConfig
from megarl.observe.console import print_line
from megarl.observe.failure import mark_step
from megarl.platform.progress import PROGRESS
from megarl.platform.usage import profiler_activities


class StepProfiler:
    """Goes around each step: `with profiler.step(12): …`.

    Writes `step-000012-rank-00003.json.gz` for the steps and ranks of the config, which chrome://tracing and
    ui.perfetto.dev open. An exception that leaves a step knows its number (`failure.place_of`), and so do other ranks.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        settings = config.observe.profile
        self._steps = frozenset(settings.steps) if rank in settings.ranks else frozenset()
        self._folder = Path(settings.dir or Path(config.trainer.default_local_dir, "profile"))
        self._rank = rank

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Traces the block if this step is one of those that are wanted."""
        PROGRESS.begin_step(number)
        try:
            if number not in self._steps:
                yield
                return
            with torch.profiler.profile(
                activities=profiler_activities(), record_shapes=True, profile_memory=True
            ) as profile:
                yield
        except BaseException as error:
            mark_step(error, number)
            raise
        self._write(profile, number)

    def _write(self, profile: torch.profiler.profile, number: int) -> None:
        file = self._folder / f"step-{number:06d}-rank-{self._rank:05d}.json.gz"
        part = file.with_name(f".{file.name}")  # it is the ending that says how it is written
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(part))
            os.replace(part, file)
        except (OSError, RuntimeError) as error:
            print_line(f"warning: rank {self._rank}: the trace of step {number} was not written ({error}).")
        else:
            print_line(f"rank {self._rank}: the trace of step {number} is in {file}")
