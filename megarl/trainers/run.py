"""A whole run: joins the world, builds the parts, goes through the steps, and leaves in good order."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
import transformers

from megarl import platform
from megarl.checkpoint.run_lock import RunLock
from megarl.config import RunConfig
from megarl.parallel.groups import Groups, build_groups
from megarl.platform.usage import record_allocations
from megarl.processes.stop_signals import EXIT_PREEMPTED
from megarl.trainers.failures import Failures
from megarl.trainers.preemption import Preempted
from megarl.trainers.preference_run import run_preference
from megarl.trainers.reward_model import run_reward_model
from megarl.trainers.rl_run import run_rl
from megarl.trainers.sft import run_sft
from megarl.weights.together import on_first_rank

HANG_REPORT_S = 120.0
"""How much longer process groups wait than `observe.hang_timeout_s`: by then the ranks have said who is missing."""

LOOPS: dict[str, Callable[[RunConfig, Groups], None]] = {
    "rl": run_rl,
    "sft": run_sft,
    "reward_model": run_reward_model,
    "preference": run_preference,
}


def run(config: RunConfig) -> int:
    """Runs a validated config on the ranks of torchrun; returns the exit status of this rank.

    A person's mistake (`ConfigError`) is one sentence from each rank that found it, and so is the end of another rank.
    Anything else prints its traceback with the rank. Either way the process ends at once, so that torchrun ends the
    others instead of letting them wait. A run that was asked to stop has saved itself, and ends with EXIT_PREEMPTED.
    """
    _quiet_libraries()
    timeout_s = config.observe.hang_timeout_s
    failures = Failures(config)
    try:
        _, world_size = platform.init_distributed(timeout_s + HANG_REPORT_S)
        if config.observe.memory_stacks:
            record_allocations()
        with _alone_in(config.trainer.default_local_dir):
            failures.watch(timeout_s)
            layout = config.parallel.layout(world_size)
            groups = build_groups(layout, seed=config.trainer.seed, timeout_s=timeout_s + HANG_REPORT_S)
            status = _run_loop(config, groups)
        failures.close()
        platform.shutdown_distributed()
        return status
    except BaseException as error:  # torch's CheckpointException is no Exception
        failures.leave_because_of(error)


@contextlib.contextmanager
def _alone_in(folder: str | Path) -> Iterator[None]:
    """Holds the lock of a run's folder. Collective over the world.

    Raises:
        ConfigError: on every rank; another run has it.
    """
    lock = RunLock(folder)
    note = on_first_rank(lock.acquire)
    if note and dist.get_rank() == 0:
        print(note, file=sys.stderr, flush=True)
    try:
        yield
    finally:
        lock.release()


def _run_loop(config: RunConfig, groups: Groups) -> int:
    """Runs the loop to its end, or until somebody asks it to stop."""
    status = 0
    try:
        LOOPS[config.trainer.kind](config, groups)
    except Preempted as preempted:
        if groups.rank == 0:
            print(preempted, file=sys.stderr, flush=True)
        status = EXIT_PREEMPTED
    return status


def _quiet_libraries() -> None:
    """Progress bars and notes of libraries drown a run's own lines, once a rank."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("megatron").setLevel(logging.WARNING)
