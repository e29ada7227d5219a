"""Where in a run an exception was raised: its step and its phases, which only those that are unwound know."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

_ATTRIBUTE = "megarl_place"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailurePlace:
    """What is known of where an exception comes from."""

    step: int | None = None
    phases: tuple[str, ...] = ()
    """As `Timers` names them, the outermost first."""

    def describe(self) -> str:
        """E.g. ` in update_actor of step 12`, to follow a verb; empty where nothing is known."""
        # "in step of step 12" says nothing twice.
        inner = self.phases[-1] if self.phases and self.phases[-1] != "step" else None
        phase = f" in {inner}" if inner else ""
        step = "" if self.step is None else f" of step {self.step}" if inner else f" in step {self.step}"
        return phase + step


def place_of(error: BaseException) -> FailurePlace:
    """Where an exception comes from, as far as it passed what marks it."""
    return getattr(error, _ATTRIBUTE, FailurePlace())


def mark_phases(error: BaseException, phases: Sequence[str]) -> None:
    """Notes the phases that were running, unless an inner one has done so."""
    if not place_of(error).phases:
        _mark(error, replace(place_of(error), phases=tuple(phases)))


def mark_step(error: BaseException, step: int) -> None:
    """Notes the step."""
    _mark(error, replace(place_of(error), step=step))


def _mark(error: BaseException, place: FailurePlace) -> None:
    with contextlib.suppress(AttributeError):  # an exception with __slots__ goes unmarked
        setattr(error, _ATTRIBUTE, place)
