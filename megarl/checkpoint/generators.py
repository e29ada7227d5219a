"""The random generators of a rank's process, as a checkpoint keeps them: `rng/rank-00003.pt`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.checkpoint.staged import write_object
from megarl.weights.together import raise_together

RNG_FOLDER = "rng"


def write_generators(folder: Path) -> None:
    """Writes those of this rank into the checkpoint at `folder`, whose `rng/` exists.

    Raises:
        OSError: the file cannot be written.
    """
    write_object(_file(folder), _states())


def read_generators(folder: Path) -> None:
    """Restores those of this rank, where the world has as many ranks as the one that saved. Collective over the world.

    Elsewhere they stay as they were seeded: a rank's part of the work is another one.

    Raises:
        ConfigError: on every rank; a file is missing or damaged.
    """
    if len(list((folder / RNG_FOLDER).glob("rank-*.pt"))) != dist.get_world_size():
        return
    states, problem = {}, None
    try:
        states = torch.load(_file(folder), weights_only=False)
    except Exception:  # a damaged pickle may raise anything
        problem = f"{_file(folder)} cannot be read, it is incomplete or damaged; use another checkpoint"
    raise_together(problem)
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])


def _file(folder: Path) -> Path:
    return folder / RNG_FOLDER / f"rank-{dist.get_rank():05d}.pt"


def _states() -> dict[str, Any]:
    """Every generator of this process. Megatron-Core's tracker holds those of tensor parallelism."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
