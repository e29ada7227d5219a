"""Preferences between two responses as functions of their scores: what reward models learn and are measured by."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """−log σ(chosen − rejected − margin), elementwise: the negative log-likelihood of the preference.

    Bradley and Terry 1952; for reward models arXiv:2203.02155, equation 1; the margin is that of arXiv:2307.09288,
    equation 2.
    """
    return -F.logsigmoid(chosen - rejected - margin)


def centering_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(chosen + rejected)², elementwise (arXiv:2312.09244, appendix). Preferences leave the scores' origin open."""
    return (chosen + rejected).square()


def preference_kl(teacher_gap: Tensor, student_gap: Tensor) -> Tensor:
    """KL divergence of the student's preference from the teacher's, in nats, elementwise.

    A model prefers the first response with probability σ(gap), where gap is the first score less the second:
    KL(Bernoulli(σ(teacher)) ‖ Bernoulli(σ(student))).
    """
    p = torch.sigmoid(teacher_gap)
    # log σ(−x) itself, since log(1 − σ(x)) is −∞ where σ(x) rounds to 1.
    first = F.logsigmoid(teacher_gap) - F.logsigmoid(student_gap)
    second = F.logsigmoid(-teacher_gap) - F.logsigmoid(-student_gap)
    return p * first + (1 - p) * second


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's rank correlation τ-b of two lists of scores (Kendall 1945), which takes ties out of both.

    1 where they order all items alike, −1 where in reverse, 0 where one has only ties. O(n log n) comparisons.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} scores cannot be compared with {len(b)}")
    concordant_less_discordant = 0
    seen: list[float] = []  # b of all items with a smaller a, ascending
    for _, group in itertools.groupby(sorted(zip(a, b, strict=True)), key=lambda item: item[0]):
        values = [value for _, value in group]
        for value in values:
            smaller, not_larger = bisect.bisect_left(seen, value), bisect.bisect_right(seen, value)
            concordant_less_discordant += smaller - (len(seen) - not_larger)
        for value in values:
            bisect.insort(seen, value)
    untied = math.sqrt(_untied_pairs(a) * _untied_pairs(b))
    return concordant_less_discordant / untied if untied else 0.0


def _untied_pairs(values: Sequence[float]) -> int:
    counts = (len(list(group)) for _, group in itertools.groupby(sorted(values)))
    return math.comb(len(values), 2) - sum(math.comb(count, 2) for count in counts)
