"""Checkpoints of a run: everything that is needed to go on, in any layout.

<run>/checkpoints/step-000010/
  megarl.json, hf/, weights/   the model, as `weights` writes it: the conversion tools read a run's checkpoint too
  optimizer/                   float32 weights and moments (`optimizer_state`)
  critic/                      where there is one: the same of the critic
  state.json                   step, config, sampler, learning-rate schedule, weight version, controllers, buffers
  rng/rank-00003.pt            generators of each rank (`generators`)
  hf-export/                   with `checkpoint.export_hf_on_save`: the model as a Hugging Face folder
  files.json                   every file with size and checksum (`file_list`)
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.checkpoint.dist_format import sharded_tensors
from megarl.checkpoint.file_list import FileSum, write_file_list
from megarl.checkpoint.generators import RNG_FOLDER, read_generators, write_generators
from megarl.checkpoint.manifest import WEIGHTS_FOLDER
from megarl.checkpoint.optimizer_state import read_optimizer, stage_optimizer
from megarl.checkpoint.publish import publish
from megarl.checkpoint.staged import HostMemory, StagedWrite, stage
from megarl.checkpoint.weights import describe_weights, load_weights
from megarl.models.train import TrainableModel
from megarl.weights.save_hf import save_hf
from megarl.weights.together import SharedOutcome, file_problem, raise_together

STATE_NAME, OPTIMIZER_FOLDER, EXPORT_FOLDER = "state.json", "optimizer", "hf-export"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedModel:
    """A model that a checkpoint covers."""

    trainable: TrainableModel
    source_hf: str | Path
    """The Hugging Face folder that it was made from, which gives config.json and tokenizer."""


class CopyMemory:
    """Host memory that a run's checkpoints are copied to, one after another."""

    def __init__(self) -> None:
        self._parts: dict[str, HostMemory] = {}

    def of(self, part: str) -> HostMemory:
        """That of one part of a checkpoint, by its place in it."""
        return self._parts.setdefault(part, HostMemory())


class CheckpointWrite:
    """A checkpoint on its way to the disk. `begin_checkpoint` makes it, and `finish` publishes it."""

    def __init__(
        self, folder: Path, temporary: Path, cleanup: contextlib.ExitStack, staged: Sequence[StagedWrite], thread: bool
    ) -> None:
        self.folder = folder
        self._temporary = temporary
        self._cleanup = cleanup
        """Removes the temporary folder where something fails, and publishes it where nothing does."""
        self._staged = staged
        self._is_complete = False
        self._problem: str | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    def is_written(self) -> bool:
        """Whether this rank's bytes are on the disk, or have failed to get there."""
        return self._thread is not None and not self._thread.is_alive()

    def complete(self) -> None:
        """Waits for the bytes of all ranks: all that is left then is to publish them. Collective over the world.

        Raises:
            ConfigError: on every rank; a rank could not write, and nothing is left behind.
        """
        if self._is_complete:
            return
        with self._cleanup as cleanup:
            if self._thread is None:
                self._write()
            else:
                self._thread.join()
            if self._failure is not None:
                raise self._failure
            raise_together(self._problem)
            self._describe()
            self._cleanup = cleanup.pop_all()
        self._is_complete = True

    def finish(self) -> None:
        """Completes the checkpoint and publishes it. Collective over the world.

        Raises:
            ConfigError: on every rank; a rank could not write, and nothing is left behind.
        """
        self.complete()
        self._cleanup.close()

    def _write(self) -> None:
        """This rank's bytes. What goes wrong is kept, since a thread has nobody to tell."""
        try:
            for staged in self._staged:
                staged.write()
        except OSError as error:
            self._problem = file_problem(error, self._temporary)
        except BaseException as error:
            self._failure = error

    def _describe(self) -> None:
        """Rank 0 writes what is known only once all ranks have written."""
        sums = {path: found for staged in self._staged for path, found in staged.sums().items()}
        mine = ([staged.results for staged in self._staged], sums)
        is_first = dist.get_rank() == 0
        everyones: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(mine, everyones)
        outcome = SharedOutcome()
        with outcome.attempt(self._temporary):
            if everyones is not None:
                for place, staged in enumerate(self._staged):
                    staged.write_metadata([results[place] for results, _ in everyones])
                known: dict[str, FileSum] = {
                    str(path.relative_to(self._temporary)): found
                    for _, found_sums in everyones
                    for path, found in found_sums.items()
                }
                write_file_list(self._temporary, known)
        outcome.check()


def begin_checkpoint(
    model: SavedModel,
    folder: Path,
    state: dict[str, Any],
    others: Mapping[str, SavedModel],
    *,
    memory: CopyMemory | None,
    export_hf: bool = False,
) -> CheckpointWrite:
    """Begins a checkpoint, which appears under its name when it is `finish`ed. Collective over the world.

    Args:
        folder: must not exist.
        state: JSON; the same on every rank.
        others: further models, each in a folder of its name.
        memory: to copy the values to and write them from in a thread, so that training can go on and change them; one
            checkpoint at a time. Without it they are written in `complete`, and nothing may change before.
        export_hf: write each model as a Hugging Face folder too; always at once, since it takes all ranks.

    Raises:
        ConfigError: on every rank; it cannot be written.
    """
    with contextlib.ExitStack() as cleanup:
        temporary = cleanup.enter_context(publish(folder))
        places = {temporary: model, **{temporary / name: other for name, other in others.items()}}
        _make_folders(temporary, places, state, export_hf)
        staged = []
        for place, saved in places.items():
            describe_weights(saved.trainable.model, place, saved.source_hf)
            of = lambda part, place=place: memory and memory.of(f"{place.relative_to(temporary)}/{part}")
            weights = sharded_tensors(saved.trainable.model)
            staged.append(stage(weights, place / WEIGHTS_FOLDER, of(WEIGHTS_FOLDER)))
            staged.append(stage_optimizer(saved.trainable, place / OPTIMIZER_FOLDER, of(OPTIMIZER_FOLDER)))
            if export_hf:
                save_hf(saved.trainable.model, place / EXPORT_FOLDER, source_folder=saved.source_hf)
        outcome = SharedOutcome()
        with outcome.attempt(temporary):
            write_generators(temporary)
        outcome.check()
        return CheckpointWrite(folder, temporary, cleanup.pop_all(), staged, thread=memory is not None)


def load_checkpoint(trainable: TrainableModel, folder: Path, others: Mapping[str, TrainableModel]) -> None:
    """Restores models of any layout, and the generators where the world is as large. Collective over the world.

    Raises:
        ConfigError: on every rank; a damaged checkpoint, or one of another model.
    """
    for place, model in {folder: trainable, **{folder / name: other for name, other in others.items()}}.items():
        load_weights(model.model, place)
        read_optimizer(model, place / OPTIMIZER_FOLDER)
    read_generators(folder)


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint. Collective over the world.

    Raises:
        ConfigError: on every rank; it cannot be read.
    """
    state, problem = {}, None
    try:
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or "config" not in state:
            raise ValueError("it holds no config")
    except (OSError, ValueError) as error:  # ValueError: neither JSON nor text
        problem = (
            f"{folder} is not a checkpoint of a run, or a damaged one: its {STATE_NAME} cannot be read ({error}); name "
            "another one with trainer.resume_mode path"
        )
    raise_together(problem)
    return state


def peek_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint, for what a run can do without: empty where it cannot be read. Not collective."""
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        if isinstance(state, dict):
            return state
    return {}


def _make_folders(temporary: Path, places: Mapping[Path, SavedModel], state: dict[str, Any], export_hf: bool) -> None:
    outcome = SharedOutcome()
    with outcome.attempt(temporary):
        if dist.get_rank() == 0:
            for place in places:
                (place / OPTIMIZER_FOLDER).mkdir(parents=True)
                if export_hf:
                    (place / EXPORT_FOLDER).mkdir()
            (temporary / RNG_FOLDER).mkdir()
            (temporary / STATE_NAME).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    outcome.check()
