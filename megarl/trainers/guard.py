"""When a run cannot go on."""

from __future__ import annotations

from megarl.config import ConfigError

MAX_SKIPPED_STEPS = 3
"""Steps in a row whose gradient was not finite, after which a run ends: it will not get better by itself."""


class GradientGuard:
    """Counts steps whose update was left out because the gradient was NaN or infinite."""

    def __init__(self, look_at: str) -> None:
        """Args:
        look_at: what may be the reason, besides the learning rate.
        """
        self._look_at = look_at
        self._in_a_row = 0

    def after_step(self, step: int, *, skipped: bool) -> None:
        """To be called after each step.

        Raises:
            ConfigError: it was one too many in a row.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row == MAX_SKIPPED_STEPS:
            raise ConfigError(
                f"the gradient was NaN or infinite in {MAX_SKIPPED_STEPS} steps in a row, the last is step {step}; the "
                f"weights are those of before. Lower optim.lr, or look at {self._look_at}."
            )
