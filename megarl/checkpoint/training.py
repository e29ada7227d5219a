"""Checkpoints of a run: everything that is needed to go on, in any layout.

<run>/checkpoints/step-000010/
  megarl.json, hf/, weights/   the model, as `weights` writes it: the conversion tools read a run's checkpoint too
  optimizer/                   float32 weights and moments (`optimizer_state`)
  critic/                      where there is one: the same of the critic
  state.json                   step, sampler, learning-rate schedule, weight version
  rng/rank-00003.pt            generators of each rank, restored where the world has as many ranks
"""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.checkpoint.optimizer_state import read_optimizer, write_optimizer
from megarl.checkpoint.publish import publish
from megarl.checkpoint.weights import load_weights, write_weights
from megarl.models.train import TrainableModel
from megarl.weights.together import SharedOutcome, raise_together

STATE_NAME, OPTIMIZER_FOLDER, RNG_FOLDER = "state.json", "optimizer", "rng"
_STEP_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run, "checkpoints", f"step-{step:06d}")


def newest_checkpoint(run: str | Path) -> Path | None:
    """The checkpoint of the latest step, if there is one. Unfinished ones have other names."""
    found = {
        int(match[1]): path
        for path in Path(run, "checkpoints").glob("step-*")
        if (match := _STEP_NAME.fullmatch(path.name))
    }
    return found[max(found)] if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """A model that a checkpoint covers."""

    trainable: TrainableModel
    source_hf: str | Path
    """The Hugging Face folder that it was made from, which gives config.json and tokenizer."""


def save_training(model: SavedModel, folder: Path, state: dict[str, Any], others: Mapping[str, SavedModel]) -> None:
    """Writes a checkpoint, which appears under its name when it is complete. Collective over the world.

    Args:
        folder: of `checkpoint_folder`; must not exist.
        state: JSON; the same on every rank.
        others: further models, each in a folder of its name.

    Raises:
        ConfigError: on every rank; it cannot be written.
    """
    with publish(folder) as temporary:
        outcome = SharedOutcome()
        places = {temporary: model, **{temporary / name: other for name, other in others.items()}}
        with outcome.attempt(temporary):
            if dist.get_rank() == 0:
                for place in places:
                    (place / OPTIMIZER_FOLDER).mkdir(parents=True)
                (temporary / RNG_FOLDER).mkdir()
                (temporary / STATE_NAME).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        outcome.check()
        for place, saved in places.items():
            write_weights(saved.trainable.model, place, saved.source_hf)
            write_optimizer(saved.trainable, place / OPTIMIZER_FOLDER)
        with outcome.attempt(temporary):
            torch.save(_generators(), _rng_file(temporary))
        outcome.check()


def load_training(trainable: TrainableModel, folder: Path, others: Mapping[str, TrainableModel]) -> dict[str, Any]:
    """Restores a checkpoint into models of any layout; returns its `state`. Collective over the world.

    Generators are restored where the world has as many ranks as the one that saved; elsewhere they stay as seeded.

    Raises:
        ConfigError: on every rank; not a training checkpoint, a damaged one, or one of another model.
    """
    state = _read_state(folder)
    missing = [name for name in others if not (folder / name).is_dir()]
    raise_together(
        f"{folder} has no {missing[0]}, which this run has: it is a checkpoint of another run." if missing else None
    )
    for place, model in {folder: trainable, **{folder / name: other for name, other in others.items()}}.items():
        load_weights(model.model, place)
        read_optimizer(model, place / OPTIMIZER_FOLDER)
    if len(list((folder / RNG_FOLDER).glob("rank-*.pt"))) == dist.get_world_size():
        _restore_generators(_read_generators(_rng_file(folder)))
    return state


def _read_state(folder: Path) -> dict[str, Any]:
    """`state.json`. Collective over the world."""
    state, problem = {}, None
    try:
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: neither JSON nor text
        problem = (
            f"{folder} is not a checkpoint of a run, or a damaged one: its {STATE_NAME} cannot be read ({error}); move "
            "it away to go on at the checkpoint before, or name one with trainer.resume_mode path."
        )
    raise_together(problem)
    return state


def _rng_file(folder: Path) -> Path:
    return folder / RNG_FOLDER / f"rank-{dist.get_rank():05d}.pt"


def _generators() -> dict[str, Any]:
    """Every generator of this process. Megatron-Core's tracker holds those of tensor parallelism."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _read_generators(file: Path) -> dict[str, Any]:
    """What `_generators` gave when the checkpoint was saved. Collective over the world."""
    states, problem = {}, None
    try:
        states = torch.load(file, weights_only=False)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
        problem = f"{file} cannot be read, it is incomplete or damaged; copy the checkpoint again, or use another one"
    raise_together(problem)
    return states


def _restore_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
