"""Which samples are trained on, and rewards of length: dynamic sampling, overlong shaping, PF-PPO."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megarl.algorithms.ranks import ONE_RANK, AcrossRanks

_LEAST_WEIGHT = 1e-8
"""So that samples can be drawn where all weights are 0; verl's."""

_BEST, _OTHER = 0.4, 0.1
"""max_random's weights of the best sample and of each other; arXiv:2409.06957's."""

RESAMPLING_METHODS = ("pow", "max_min", "max_random")


def informative(metric: Tensor, groups: Tensor, ranks: AcrossRanks = ONE_RANK) -> Tensor:
    """Rows whose group's metric is not constant: the others have no advantage. DAPO's filter, arXiv:2503.14476.

    A group of one sample is constant. Collective over `ranks`, over which groups may be spread.

    Args:
        metric: [rows], such as the score, or whether the answer is right.
        groups: int64 [rows], rows with the same number answer the same prompt.

    Returns:
        boolean [rows].
    """
    values = ranks.gather(metric)
    _, of_row = torch.unique(ranks.gather(groups), return_inverse=True)
    count = int(of_row.max()) + 1 if of_row.numel() else 0
    smallest, largest = (
        values.new_empty(count).scatter_reduce_(0, of_row, values, reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    return ranks.take((smallest != largest)[of_row])


def overlong_penalty(lengths: Tensor, max_response_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """0 up to `max_response_length` − `buffer` tokens, then falling linearly to −`factor` at `max_response_length`.

    Added to the reward, so that a response that is cut off is not the first to hear of the limit. DAPO's soft overlong
    punishment, arXiv:2503.14476.

    Args:
        lengths: [rows], tokens of each response.

    Returns:
        float32 [rows].

    Raises:
        ValueError: a buffer that is not within the response.
    """
    if not 0 < buffer <= max_response_length:
        raise ValueError(
            f"the overlong buffer has {buffer} tokens, but it has to be within 1 and {max_response_length}"
        )
    excess = (lengths.float() - (max_response_length - buffer)) / buffer
    return -factor * excess.clamp(0, 1)


def resampling_weights(scores: Tensor, method: str, power: float = 2.0) -> Tensor:
    """How likely each sample is to be drawn, up to a factor. PF-PPO, arXiv:2409.06957.

        pow         |score|^power
        max_min     1 for the best and the worst score, 0 for the others
        max_random  0.4 for the best score, 0.1 for the others

    Args:
        scores: [rows].

    Returns:
        float64 [rows], all above 0.

    Raises:
        ValueError: a method that does not exist.
    """
    scores = scores.double()
    best, worst = (scores.max(), scores.min()) if scores.numel() else (0.0, 0.0)
    match method:
        case "pow":
            weights = scores.abs().pow(power)
        case "max_min":
            weights = ((scores == best) | (scores == worst)).double()
        case "max_random":
            weights = torch.where(scores == best, _BEST, _OTHER).double()
        case _:
            raise ValueError(
                f"algorithm.pf_ppo.reweight_method is '{method}', but the methods are {', '.join(RESAMPLING_METHODS)}."
            )
    return weights.clamp(min=_LEAST_WEIGHT)


Item = TypeVar("Item")


class ResamplingBuffer(Generic[Item]):
    """The latest samples of a run with their scores, to draw batches from by weight. PF-PPO, arXiv:2409.06957.

    With the same seed and the same samples every rank draws the same.
    """

    def __init__(self, capacity: int, method: str, power: float, seed: int) -> None:
        """Args:
        capacity: most samples it holds; the oldest leave first.
        method: of `resampling_weights`, and `power` too.
        seed: of what is drawn.

        Raises:
            ValueError: no capacity, or a method that does not exist.
        """
        if capacity < 1:
            raise ValueError(f"a buffer of {capacity} samples holds none; give it at least 1")
        resampling_weights(torch.zeros(1), method, power)
        self._method, self._power = method, power
        self._items: deque[Item] = deque(maxlen=capacity)
        self._scores: deque[float] = deque(maxlen=capacity)
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, items: Sequence[Item], scores: Sequence[float]) -> None:
        """Takes in samples; where they are too many, the oldest are forgotten."""
        if len(items) != len(scores):
            raise ValueError(f"{len(items)} samples have {len(scores)} scores")
        self._items.extend(items)
        self._scores.extend(scores)

    def draw(self, count: int) -> list[Item]:
        """`count` samples by weight, with replacement.

        Raises:
            ValueError: the buffer is empty.
        """
        if not self._items:
            raise ValueError("no sample can be drawn from an empty buffer")
        weights = resampling_weights(torch.tensor(list(self._scores), dtype=torch.float64), self._method, self._power)
        drawn = torch.multinomial(weights, count, replacement=True, generator=self._generator)
        return [self._items[place] for place in drawn.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Samples, scores, and where chance stands."""
        return {
            "items": list(self._items),
            "scores": list(self._scores),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken; a smaller buffer keeps the latest samples."""
        self._items.clear()
        self._scores.clear()
        self.add(state["items"], state["scores"])
        self._generator.set_state(state["generator"])
