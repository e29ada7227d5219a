"""Rules that grade a response, and which rule belongs to which data set.

A grader has the signature of a user's own function: `(data_source, solution_str, ground_truth, extra_info=None)` to a
score, or to a dict with `score`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ScoreFunction = Callable[..., Any]
"""verl's signature; may be async. Arguments are passed by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grader:
    """Where a grader is, so that it is imported only where it is used: some bring large libraries along."""

    module: str
    function: str = "compute_score"
    package: str | None = None
    """What it needs beside megarl's own dependencies, as it is imported."""
    install: str | None = None
    """The same, as pip knows it."""

    def load(self) -> ScoreFunction:
        function: ScoreFunction = getattr(importlib.import_module(self.module), self.function)
        return function


GRADERS: Mapping[str, Grader] = {
    "gsm8k": Grader(module="megarl.rewards.graders.gsm8k"),
    "gsm8k_flexible": Grader(module="megarl.rewards.graders.gsm8k", function="compute_score_flexible"),
    "math": Grader(module="megarl.rewards.graders.mathematics", package="math_verify", install="math-verify"),
    "reasoning_gym": Grader(
        module="megarl.rewards.graders.generated", package="reasoning_gym", install="reasoning-gym"
    ),
    "exact_match": Grader(module="megarl.rewards.graders.exact_match"),
}
"""By the name that `reward_model.style` may give."""

DATA_SOURCES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math",
    "aime24": "math",
    "aime25": "math",
}
"""The grader of each known data set; verl's names. The name of a grader is a data source too."""

REASONING_GYM_PREFIX = "reasoning_gym/"
"""Before the name of a generated task, e.g. `reasoning_gym/chain_sum`."""

RULE_STYLES = (None, "", "rule")
"""Styles that leave the choice to the data source."""


def grader_of(data_source: str, style: str | None) -> str | None:
    """The name of the grader for rows of this data source and `reward_model.style`; None if there is none."""
    if style in GRADERS:
        return style
    if style not in RULE_STYLES:
        return None
    if data_source.startswith(REASONING_GYM_PREFIX):
        return "reasoning_gym"
    return data_source if data_source in GRADERS else DATA_SOURCES.get(data_source)
