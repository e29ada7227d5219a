"""Answers that are right when they are the same text."""

from __future__ import annotations

from typing import Any

from megarl.rewards.graders.answers import tagged_answer


def compute_score(data_source: str, solution_str: str, ground_truth: str | list[str], extra_info: Any = None) -> float:
    """1.0 where the answer is the ground truth, or one of them, letter by letter; else 0.0.

    The answer is what the last `<answer>…</answer>` holds, or the whole response. Space around either does not count.

    Raises:
        ValueError: there is no ground truth to compare with.
    """
    accepted = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth or ())
    if not accepted:
        raise ValueError("an exact_match row needs a ground_truth, but has none")
    return float(tagged_answer(solution_str) in {str(text).strip() for text in accepted})
