"""A whole run: joins the world, builds the parts, goes through the steps, and leaves in good order."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

import transformers

from megarl import platform
from megarl.config import ConfigError, RunConfig
from megarl.parallel.groups import Groups, build_groups
from megarl.trainers.preference_run import run_preference
from megarl.trainers.reward_model import run_reward_model
from megarl.trainers.rl_run import run_rl
from megarl.trainers.sft import run_sft

EXIT_BAD_CONFIG, EXIT_FAILED = 2, 1
EXIT_INTERRUPTED = 130
"""What shells give for a program that SIGINT (Ctrl-C) ended."""

LOOPS: dict[str, Callable[[RunConfig, Groups], None]] = {
    "rl": run_rl,
    "sft": run_sft,
    "reward_model": run_reward_model,
    "preference": run_preference,
}


def run(config: RunConfig) -> int:
    """Runs a validated config on the ranks of torchrun; returns the exit status of this rank.

    A person's mistake (`ConfigError`) is one sentence from each rank that found it. Anything else prints its traceback
    with the rank. Either way the process ends at once, so that torchrun ends the others instead of letting them wait.
    """
    rank, world_size = platform.init_distributed()
    _quiet_libraries()
    try:
        groups = build_groups(config.parallel.layout(world_size), seed=config.trainer.seed)
        LOOPS[config.trainer.kind](config, groups)
    except ConfigError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        leave_at_once(EXIT_BAD_CONFIG)
    except KeyboardInterrupt:
        print(f"rank {rank}: interrupted", file=sys.stderr, flush=True)
        leave_at_once(EXIT_INTERRUPTED)
    except BaseException:  # torch's CheckpointException is no Exception
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        leave_at_once(EXIT_FAILED)
    platform.shutdown_distributed()
    return 0


def leave_at_once(status: int) -> None:
    """Ends the process without tearing down process groups, which would wait for ranks that may never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _quiet_libraries() -> None:
    """Progress bars and notes of libraries drown a run's own lines, once a rank."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("megatron").setLevel(logging.WARNING)
