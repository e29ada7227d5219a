"""The checkpoints of a loop: what goes into them, how it resumes, and which are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarl import platform
from megarl.checkpoint.file_list import damage_of
from megarl.checkpoint.retention import (
    Retention,
    checkpoint_folder,
    checkpoints_of,
    clean_up,
    delete,
    set_aside,
)
from megarl.checkpoint.training import (
    CheckpointWrite,
    CopyMemory,
    SavedModel,
    begin_checkpoint,
    load_checkpoint,
    peek_state,
    read_state,
)
from megarl.checkpoint.weights import load_weights
from megarl.config import ConfigError, RunConfig
from megarl.config.changes import as_record
from megarl.data.sampler import PromptSampler
from megarl.models.train import TrainableModel
from megarl.trainers.resuming import check_same_run, check_writable, find_checkpoint, restore_sampler
from megarl.weights.together import on_first_rank


class Resumable(Protocol):
    """The parts of a loop that a checkpoint covers."""

    config: RunConfig
    sampler: PromptSampler
    schedule: Any
    optimizer_steps: int

    @property
    def trainable(self) -> TrainableModel: ...


class Stateful(Protocol):
    """Something else of a loop that goes on where it was, such as a controller."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def is_due(step: int, frequency: int, is_last: bool) -> bool:
    """Whether something that happens every `frequency` steps, and after the last, happens now; −1 is never."""
    return frequency > 0 and (is_last or step % frequency == 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """A checkpoint that is not published yet."""

    step: int
    metric: float | None
    protected: frozenset[int]
    write: CheckpointWrite
    is_due: bool
    """Whether the next `poll` publishes it, also where that has to wait for what is still being written."""
    problem: str | None
    """What is to be raised when it is published."""


class RunCheckpoints:
    """Saves a loop and resumes it. Every rank has one, and its methods are collective over the world."""

    def __init__(
        self,
        parts: Resumable,
        others: Mapping[str, Stateful] | None = None,
        further_models: Mapping[str, SavedModel] | None = None,
    ) -> None:
        """Args:
        others: by name; their states are JSON, the same on every rank.
        further_models: by name, such as a critic.
        """
        self._parts = parts
        self._others = others or {}
        self._models = further_models or {}
        self._settings = settings = parts.config.checkpoint
        self._run = Path(parts.config.trainer.default_local_dir)
        self._retention = Retention(
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=settings.keep_best,
            best_mode=settings.best_mode,
        )
        self._pending: _Pending | None = None
        self._memory = CopyMemory()
        self._metrics: dict[int, float | None] = {}
        """Of each checkpoint in the run's folder its `checkpoint.best_metric`."""
        self._notes: list[str] = []
        self._tell: Callable[[str], None] = self._notes.append

    def report_to(self, tell: Callable[[str], None]) -> None:
        """Hands on the lines for people: those so far now, others as they come. They are the same on every rank."""
        for note in self._notes:
            tell(note)
        self._tell = tell

    @property
    def steps(self) -> list[int]:
        """Those whose checkpoints are in the run's folder, in order."""
        return sorted(self._metrics)

    def resume(self) -> int:
        """Restores the checkpoint that `trainer.resume_mode` names, if any; returns the steps it has behind it.

        Checkpoints of later steps in the run's folder are moved to `set-aside`. What is in `others` and not in the
        checkpoint, because it was switched on since, begins anew.

        Raises:
            ConfigError: no checkpoint can be written, or the one to resume is damaged or not one of this run.
        """
        check_writable(self._parts.config)
        folder = find_checkpoint(self._parts.config, self._tell)
        step = 0
        if folder is not None:
            step = self._restore(folder)
            self._tell(f"resumed after step {step} from {folder}")
        self._set_aside(step)
        self._metrics = on_first_rank(self._saved_metrics)
        return step

    def roll_back_to(self, step: int) -> None:
        """Restores the checkpoint of an earlier step of this run, and moves those of later steps to `set-aside`.

        Args:
            step: one of `steps`.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        self.finish()
        folder = checkpoint_folder(self._run, step)
        problem = damage_of(folder, contents=self._settings.verify)
        if problem is not None:
            raise ConfigError(f"{problem}; the run cannot go back to it.")
        self._restore(folder)
        self._set_aside(step)
        self._metrics = {saved: metric for saved, metric in self._metrics.items() if saved <= step}

    def save(
        self, step: int, metrics: Mapping[str, float], *, protected: Collection[int] = (), wait: bool = False
    ) -> None:
        """Saves the state after `step`, which `poll` or `finish` publish; nothing where that is done already.

        With `checkpoint.async_save` it is still being written when this returns.

        Args:
            metrics: of the step, for `checkpoint.best_metric`.
            protected: steps whose checkpoints are not to be deleted.
            wait: have it written when this returns, whatever the config says.

        Raises:
            ConfigError: it cannot be written, and `checkpoint.on_failure` is stop; or so it was with the one before.
        """
        self.finish()
        if step in self._metrics:
            return
        in_background = self._settings.async_save and not wait
        metric, problem = self._best_metric(step, metrics)
        if wait:
            problem = None  # a run that is asked to stop may be between two measurements
        on_first_rank(lambda: clean_up(self._run))
        try:
            write = begin_checkpoint(
                SavedModel(trainable=self._parts.trainable, source_hf=self._parts.config.model.path),
                checkpoint_folder(self._run, step),
                self._state(step, metric),
                self._models,
                memory=self._memory if in_background else None,
                export_hf=self._settings.export_hf_on_save,
            )
            if not in_background:
                write.complete()
        except ConfigError as error:
            self._failed(step, error)
            return
        self._pending = _Pending(
            step=step,
            metric=metric,
            protected=frozenset(protected),
            write=write,
            is_due=not in_background or problem is not None,
            problem=problem,
        )

    def load_weights_of(self, step: int) -> bool:
        """Gives the model the weights of an earlier step, and nothing else; False where that has no checkpoint.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        self.finish()
        if step not in self._metrics:
            return False
        load_weights(self._parts.trainable.model, checkpoint_folder(self._run, step))
        return True

    def poll(self) -> None:
        """Publishes the checkpoint that is being written, once every rank has written its part.

        For each step, when its metrics are written: a run that is killed in between takes the step again, while one
        that goes on after it would never have them.

        Raises:
            ConfigError: as by `finish`.
        """
        if self._pending is None:
            return
        if self._pending.is_due:
            self.finish()
            return
        written = torch.tensor(float(self._pending.write.is_written()), device=platform.current().device)
        dist.all_reduce(written, op=dist.ReduceOp.MIN)
        if bool(written):
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one, and publishes it.

        Raises:
            ConfigError: it could not be written, and `checkpoint.on_failure` is stop; or its step lacks
                `checkpoint.best_metric`.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.write.finish()
        except ConfigError as error:
            self._failed(pending.step, error)
            return
        self._metrics[pending.step] = pending.metric
        for step in self._retention.surplus(self._metrics, pending.protected):
            on_first_rank(lambda step=step: delete(checkpoint_folder(self._run, step)))
            del self._metrics[step]
        if pending.problem is not None:
            raise ConfigError(pending.problem)

    def _state(self, step: int, metric: float | None) -> dict[str, Any]:
        parts = self._parts
        return {
            "step": step,
            "optimizer_steps": parts.optimizer_steps,
            "sampler": parts.sampler.state_dict(),
            "schedule": parts.schedule.state_dict(),
            "others": {name: other.state_dict() for name, other in self._others.items()},
            "best_metric": {"name": self._settings.best_metric, "value": metric},
            "config": as_record(parts.config),
        }

    def _restore(self, folder: Path) -> int:
        parts = self._parts
        state = read_state(folder)
        check_same_run(folder, state["config"], parts.config, self._models, self._tell)
        restore_sampler(folder, state["sampler"], parts.sampler, parts.config, self._tell)
        load_checkpoint(parts.trainable, folder, {name: saved.trainable for name, saved in self._models.items()})
        parts.schedule.load_state_dict(state["schedule"])
        parts.optimizer_steps = state["optimizer_steps"]
        for name, other in self._others.items():
            if name in state["others"]:
                other.load_state_dict(state["others"][name])
        return int(state["step"])

    def _set_aside(self, step: int) -> None:
        moved = on_first_rank(lambda: set_aside(self._run, after=step))
        if moved:
            self._tell(f"checkpoints of later steps were moved: {', '.join(map(str, moved))}")

    def _saved_metrics(self) -> dict[int, float | None]:
        """Of each checkpoint in the run's folder; None where it was saved with another `best_metric`."""
        found: dict[int, float | None] = {}
        for step, folder in checkpoints_of(self._run).items():
            metric = peek_state(folder).get("best_metric", {})
            found[step] = metric.get("value") if metric.get("name") == self._settings.best_metric else None
        return found

    def _best_metric(self, step: int, metrics: Mapping[str, float]) -> tuple[float | None, str | None]:
        """The value of `checkpoint.best_metric`, as rank 0 has it, and what is wrong where there is none."""
        wanted = self._settings.best_metric
        if wanted is None:
            return None, None

        def look_up() -> tuple[float | None, str | None]:
            if wanted in metrics:
                return float(metrics[wanted]), None
            near = get_close_matches(wanted, metrics, n=1, cutoff=0.0)
            return None, (
                f"checkpoint.best_metric {wanted} is none of the metrics of step {step}, whose checkpoint is saved all "
                f"the same: name one of them{', such as ' + near[0] if near else ''}, or save where it is measured."
            )

        return on_first_rank(look_up)

    def _failed(self, step: int, error: ConfigError) -> None:
        """A checkpoint could not be written. The error is the same on every rank."""
        newest = max(self._metrics, default=None)
        before = "there is none before it" if newest is None else f"{checkpoint_folder(self._run, newest)} is whole"
        what = f"the checkpoint of step {step} was not saved and nothing of it is left: {error}; {before}"
        if self._settings.on_failure == "stop":
            raise ConfigError(
                f"{what}. Put that right and start the run again, or let it go on without it (checkpoint.on_failure "
                "warn)."
            )
        self._tell(f"warning: {what}; the run goes on, and saves when the next one is due")
