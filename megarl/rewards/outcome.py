"""What scoring one response ends in: rewards by name, or a failure that has a name."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SCORE = "score"
"""The reward that is trained on."""

_LONGEST_MESSAGE = 500


class FailureKind(StrEnum):
    """Every way in which scoring can fail."""

    EXCEPTION = "exception"
    """the function raised, SystemExit included"""
    TIMEOUT = "timeout"
    """it took longer than `reward.timeout_s`"""
    WORKER_DIED = "worker_died"
    """its process ended: killed from outside (memory), os._exit, a crash in C code"""
    RETURNED_NONE = "returned_none"
    RETURNED_NAN = "returned_nan"
    """NaN or an infinity"""
    RETURNED_WRONG_TYPE = "returned_wrong_type"
    """neither a number nor a dict with a number as `score`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a response has no score."""

    kind: FailureKind
    message: str
    """One line."""
    cause: str = ""
    """What the first traceback is logged for: the exception's type, or nothing where the kind says it all."""
    traceback: str = ""
    """Of the function, several lines; where it stood, for a timeout or a crash. May be empty."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    @classmethod
    def of_exception(cls, error: BaseException) -> Failure:
        message = " ".join("".join(traceback.format_exception_only(error)).split())
        return cls(
            kind=FailureKind.EXCEPTION,
            message=message[:_LONGEST_MESSAGE],
            cause=type(error).__name__,
            traceback="".join(traceback.format_exception(error)),
        )


Outcome = dict[str, float] | Failure


def read_rewards(returned: Any) -> Outcome:
    """What a reward function returned, as rewards by name.

    A number is the score. Of a dict, entries that are numbers are kept, and texts and the like are left out.
    """
    if returned is None:
        return Failure(kind=FailureKind.RETURNED_NONE, message="the reward function returned None")
    entries = returned if isinstance(returned, Mapping) else {SCORE: returned}
    rewards = {str(name): number for name, value in entries.items() if (number := _number(value)) is not None}
    if SCORE not in rewards:
        return Failure(kind=FailureKind.RETURNED_WRONG_TYPE, message=_wrong_type(returned))
    if not math.isfinite(rewards[SCORE]):
        return Failure(kind=FailureKind.RETURNED_NAN, message=f"the reward function returned {rewards[SCORE]}")
    return rewards


def _number(value: Any) -> float | None:
    """A number of any library (bool, numpy, a tensor of one element) as a float; None for anything else."""
    if not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # e.g. an array of several numbers
        return None


def _wrong_type(returned: Any) -> str:
    if isinstance(returned, Mapping) and SCORE not in returned:
        return (
            f"the reward function returned a dict without '{SCORE}', with {', '.join(map(str, returned)) or 'nothing'}"
        )
    value, what = (returned[SCORE], f"'{SCORE}' is") if isinstance(returned, Mapping) else (returned, "it is")
    return f"the reward function must return a number, or a dict with '{SCORE}'; {what} of type {type(value).__name__}"
