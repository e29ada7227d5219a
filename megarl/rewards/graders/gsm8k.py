"""GSM8K: a number after `####` (arXiv:2110.14168), compared with the published one by value."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = r"(?<!\w)-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
"""With thousands separators and a dollar sign, as models write it. A minus after a digit is a subtraction."""
_ANY_NUMBER = re.compile(_NUMBER + r"|\d[\d,]*(?:\.\d+)?")
_MARKED_NUMBER = re.compile(rf"####[ \t]*({_NUMBER})")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 where the last number after `####` equals the ground truth, else 0.0: it has to be right and marked.

    The default for `openai/gsm8k`, as verl's `strict`. Unlike verl's, it compares numbers and not texts, so that
    `#### 1,000`, `#### $1000` and `#### 1000.00` are the same answer.

    Raises:
        ValueError: the ground truth is not a number.
    """
    marked = _MARKED_NUMBER.findall(solution_str)
    return _score(marked[-1] if marked else None, ground_truth)


def compute_score_flexible(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 where the last number of the response equals the ground truth, marked or not; verl's `flexible`.

    Raises:
        ValueError: the ground truth is not a number.
    """
    numbers = _ANY_NUMBER.findall(solution_str)
    return _score(numbers[-1] if numbers else None, ground_truth)


def _score(answer: str | None, ground_truth: str) -> float:
    try:
        expected = _value(str(ground_truth))
    except InvalidOperation:
        raise ValueError(f"the ground_truth of a GSM8K row is a number, not {ground_truth!r}") from None
    return float(answer is not None and _value(answer) == expected)


def _value(number: str) -> Decimal:
    return Decimal(number.strip().replace(",", "").replace("$", ""))
