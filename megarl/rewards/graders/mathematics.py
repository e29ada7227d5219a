"""MATH and its like: an expression in LaTeX or plain text, compared by value through math-verify."""

from __future__ import annotations

import functools
import logging
from typing import Any

from math_verify import parse, verify

from megarl.rewards.graders.answers import boxed_answer

# math-verify's own time limits are alarm signals: they work in a main thread only, interrupt nothing in C code, and
# swallow what they interrupt as a wrong answer. The worker's limit covers the whole call, so they are off, and
# math-verify's warning that they are is not for users.
_NO_LIMIT = None
logging.getLogger("math_verify").setLevel(logging.ERROR)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    r"""1.0 where the answer equals the ground truth as mathematics, else 0.0.

    The answer is what the last `\boxed{…}` holds; without a box, the last expression in the response.

    Args:
        ground_truth: LaTeX, with or without a `\boxed{…}` around it.

    Raises:
        ValueError: the ground truth is nothing that can be parsed.
    """
    gold = _parse_ground_truth(ground_truth)
    boxed = boxed_answer(solution_str)
    answer = parse(solution_str if boxed is None else _box(boxed), parsing_timeout=_NO_LIMIT)
    return float(verify(gold, answer, timeout_seconds=_NO_LIMIT))


@functools.lru_cache(maxsize=64)  # the samples of a group come one after the other
def _parse_ground_truth(ground_truth: str) -> list[Any]:
    boxed = boxed_answer(str(ground_truth))
    gold = parse(_box(str(ground_truth) if boxed is None else boxed), parsing_timeout=_NO_LIMIT)
    if not gold:
        raise ValueError(f"the ground_truth {ground_truth!r} cannot be read as mathematics")
    return list(gold)


def _box(expression: str) -> str:
    return f"\\boxed{{{expression}}}"
