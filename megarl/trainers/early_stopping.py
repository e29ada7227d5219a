"""Ends a run whose validation loss does not get better any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.schema import TrainerConfig


@dataclass(kw_only=True, slots=True)
class EarlyStopping:
    """Counts evaluations since the best one (Prechelt 1998, "Early stopping – but when?"; Keras's rule)."""

    patience: int
    """Evaluations without improvement after which the run ends."""
    min_delta: float
    """How much lower than the best a loss must be to be an improvement."""
    best_loss: float | None = None
    best_step: int | None = None
    evaluations_since: int = 0

    @classmethod
    def of(cls, config: TrainerConfig) -> EarlyStopping | None:
        """That of a config; None where `trainer.early_stopping_patience` is null."""
        if config.early_stopping_patience is None:
            return None
        return cls(patience=config.early_stopping_patience, min_delta=config.early_stopping_min_delta)

    @property
    def is_over(self) -> bool:
        """Whether the run should end."""
        return self.evaluations_since >= self.patience

    def update(self, step: int, loss: float) -> None:
        """Takes the validation loss after `step` in. A loss that is NaN is no improvement."""
        if loss < (float("inf") if self.best_loss is None else self.best_loss - self.min_delta):
            self.best_loss, self.best_step, self.evaluations_since = loss, step, 0
        else:
            self.evaluations_since += 1

    def description(self) -> str:
        """Which step was the best, in a sentence."""
        if self.best_loss is None:
            return "early stopping: no evaluation gave a validation loss."
        best = f"the lowest validation loss is {self.best_loss:.6g}, of step {self.best_step}"
        if not self.is_over:
            return f"early stopping: {best}."
        return (
            f"stopped early: {best}; no evaluation in the {self.evaluations_since} since has been more than "
            f"{self.min_delta:g} below it."
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "evaluations_since": self.evaluations_since,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]
        self.evaluations_since = state["evaluations_since"]
